"""The tree keeps its shape: imports point one way, a file is host or device, importing does nothing."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import dapo_jax

PACKAGE = Path(dapo_jax.__file__).parent
# Lower layers first. A module may import from its own layer and from those below.
LAYERS = [
    ("errors", "places", "config"),
    ("parallel", "monitor"),
    ("hub",),
    ("models", "data", "algorithms"),
    ("rewards",),
    ("learner", "rollout", "dynamic_sampling", "progress"),
    ("checkpoint", "problems", "verl"),
    ("command", "other_runs"),
    ("base_models",),
    ("downloads",),
    ("settings",),
    ("teacher",),
    ("training_memory", "meshes", "held_out", "sample_texts"),
    ("run", "reports", "step_metrics", "model_card"),
    ("state", "estimator_inputs"),
    ("step",),
    ("training", "evaluate", "export", "preflight", "from_verl", "report", "tools", "env"),
    ("interface",),
    ("train", "cli", "__init__"),
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def modules() -> list[Path]:
    return [path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"]


def part(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported_parts(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dapo_jax"):
            names = node.module.split(".")[1:] or [alias.name for alias in node.names]
            found |= {names[0]} - {"__version__"}
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("dapo_jax.")}
    return found


def test_imports_never_point_upwards():
    for path in modules():
        for name in imported_parts(path):
            assert LEVEL[name] <= LEVEL[part(path)], f"{path} imports {name}, which is above it"


def test_every_file_says_whether_it_is_host_or_device():
    for path in modules():
        if path.name in ("containers.py",):
            continue
        docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
        assert docstring.startswith(("Host:", "Device:")), path


# What runs in a verifier's process, where the text of an error is the sample's, and what reads no input.
WITHOUT_INPUT = {f"rewards/{name}.py" for name in ("results", "arithmetic", "math_verifier", "reasoning_gym")}
WITHOUT_INPUT |= {"preflight/hlo_text.py"}


def test_wrong_input_is_refused_by_an_error_of_its_own():
    """A plain ValueError is a bug, or JAX's: with exit code 2 another command would not be tried."""
    for path in modules():
        found = "ValueError(" in path.read_text()
        assert found == (str(path.relative_to(PACKAGE)) in WITHOUT_INPUT), path


def test_the_package_does_not_import_torch_or_transformers():
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & {"torch", "transformers"}, path


def test_importing_everything_touches_no_device():
    names = [
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for path in modules()
        if path.name != "worker.py"
    ]
    code = "\n".join(f"import {name}" for name in names)
    code += "\nfrom jax._src import xla_bridge\nassert not xla_bridge.backends_are_initialized()"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})


def test_verifier_workers_do_not_load_jax():
    code = "import sys, dapo_jax.rewards.worker, dapo_jax.rewards.verifiers; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


UNSAFE_MODULES = {"pickle", "dill", "cloudpickle", "marshal", "shelve"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__", "yaml.load", "torch.load", "joblib.load"}


def unsafe_uses(code: str) -> set[str]:
    """What in the code can run code that it reads from a file, a text or another process."""
    found = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found |= {name for name in names if name.split(".")[0] in UNSAFE_MODULES}
        elif isinstance(node, ast.Call):
            function = ast.unparse(node.func)
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if function in UNSAFE_CALLS or given.get("allow_pickle", "False") != "False":
                found.add(function)
    return found


def test_nothing_that_is_read_can_run_code():
    for path in modules():
        assert not unsafe_uses(path.read_text()), path
    for code in ("import pickle", "from pickle import loads", "import dill.source", "eval(x)", "yaml.load(x)"):
        assert unsafe_uses(code)
    assert unsafe_uses("np.load(x, allow_pickle=True)") and unsafe_uses("np.load(x, allow_pickle=flag)")
    assert not unsafe_uses("jax.eval_shape(f)\nre.compile(x)\nnp.load(x, allow_pickle=False)")
