"""The tree keeps its shape: imports point one way, a file is host or device, importing does nothing."""

import ast
import functools
import os
import subprocess
import sys
from pathlib import Path

import dapo_jax

PACKAGE = Path(dapo_jax.__file__).parent
# Lower layers first. A module may import from its own layer and from those below.
LAYERS = [
    ("errors", "config"),
    ("parallel", "monitor"),
    ("hub",),
    ("data",),
    ("models", "algorithms"),
    ("rewards",),
    ("learner", "rollout", "environments", "dynamic_sampling"),
    ("verl", "command"),
    ("run",),
    ("training",),
    ("evaluate", "export", "preflight"),
    ("interface",),
    ("tools",),
    ("train", "cli", "__init__"),
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def modules() -> list[Path]:
    return [path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"]


@functools.cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in modules()}


def imported(tree: ast.AST) -> list[tuple[str, list[str]]]:
    """Each imported module; with `from`, also the names that are taken from it."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, []) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append((node.module or "", [alias.name for alias in node.names]))
    return found


def test_imports_never_point_upwards():
    for path, tree in trees().items():
        own = path.relative_to(PACKAGE).with_suffix("").parts[0]
        for module, names in imported(tree):
            package, *parts = module.split(".")
            for name in set(parts[:1] or names) - {"__version__"} if package == "dapo_jax" else ():
                assert LEVEL[name] <= LEVEL[own], f"{path} imports {name}, which is above it"


def test_every_file_says_whether_it_is_host_or_device():
    for path, tree in trees().items():
        assert path.name == "containers.py" or (ast.get_docstring(tree) or "").startswith(("Host:", "Device:")), path


# What runs in a verifier's process, where the text of an error is the sample's, and what reads no input.
WITHOUT_INPUT = {f"rewards/{name}.py" for name in ("messages", "numerals", "math_verifier")}
WITHOUT_INPUT |= {"data/reasoning_gym.py", "preflight/hlo_text.py"}


def test_wrong_input_is_refused_by_an_error_of_its_own():
    """A plain ValueError is a bug, or JAX's: with exit code 2 another command would not be tried."""
    found = {str(path.relative_to(PACKAGE)) for path in modules() if "ValueError(" in path.read_text()}
    assert found == WITHOUT_INPUT


def test_what_is_printed_is_safe_for_a_terminal():
    """`say` of errors.py prints, for all."""
    calls = {path: (node for node in ast.walk(tree) if isinstance(node, ast.Call)) for path, tree in trees().items()}
    found = {path.name for path, nodes in calls.items() if any(ast.unparse(node.func) == "print" for node in nodes)}
    assert found == {"errors.py"}


def test_the_package_does_not_import_torch_or_transformers():
    for path, tree in trees().items():
        assert not {module.split(".")[0] for module, _ in imported(tree)} & {"torch", "transformers"}, path


IMPORTS = """
import sys
import dapo_jax as dx
assert not {'jax', 'numpy', 'flax', 'dapo_jax.config'} & set(sys.modules)
for name in dx.__all__:
    getattr(dx, name)
assert not [name for name in dx.__all__ if f'dapo_jax.{name}' in sys.modules]
"""
NO_DEVICE = "from jax._src import xla_bridge\nassert not xla_bridge.backends_are_initialized()"


def test_the_package_loads_nothing_no_module_hides_a_name_and_importing_everything_touches_no_device():
    paths = [path.relative_to(PACKAGE.parent).with_suffix("") for path in modules() if path.name != "worker.py"]
    code = "\n".join([IMPORTS, *(f"import {'.'.join(path.parts)}" for path in paths), NO_DEVICE])
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})


UNSAFE_MODULES = {"pickle", "dill", "cloudpickle", "marshal", "shelve"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__", "yaml.load", "torch.load", "joblib.load"}


def unsafe_uses(tree: ast.AST) -> set[str]:
    """What in the code can run code that it reads from a file, a text or another process."""
    found = {module for module, _ in imported(tree) if module.split(".")[0] in UNSAFE_MODULES}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = ast.unparse(node.func)
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if function in UNSAFE_CALLS or given.get("allow_pickle", "False") != "False":
                found.add(function)
    return found


PICKLES = "rewards/session.py"  # written in the user's process, read in a worker: tests/rewards/test_session.py


def test_nothing_that_is_read_can_run_code():
    for path, tree in trees().items():
        pickles = path == PACKAGE / PICKLES
        assert unsafe_uses(tree) == ({"cloudpickle"} if pickles else set()), path
        assert path.match("*s/worker.py") or pickles or "received(" not in path.read_text(), path
    parts = [ast.unparse(node) for node in ast.walk(trees()[PACKAGE / PICKLES]) if isinstance(node, ast.Attribute)]
    assert sorted(part for part in parts if "pickle." in part) == ["cloudpickle.dumps", "cloudpickle.loads"]
    for code in ("import pickle", "from pickle import loads", "import dill.source", "eval(x)", "yaml.load(x)"):
        assert unsafe_uses(ast.parse(code))
    for code in ("np.load(x, allow_pickle=True)", "np.load(x, allow_pickle=flag)"):
        assert unsafe_uses(ast.parse(code))
    for code in ("jax.eval_shape(f)", "re.compile(x)", "np.load(x, allow_pickle=False)"):
        assert not unsafe_uses(ast.parse(code))
