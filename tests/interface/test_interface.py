"""The names of `import dapo_jax`, and their page."""

import ast
import inspect
import re
from pathlib import Path

import pytest

import dapo_jax as dx

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/api.md").read_text()


def blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)


BLOCKS = blocks(PAGE)


@pytest.mark.slow
def test_the_examples_of_the_page_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for block in BLOCKS:
        exec(block.replace('"runs/larger"', '"runs/larger", "trainer.total_training_steps": 2'), names)
    assert len(names["accuracies"]) == 2 and names["result"].stopped == ""
    assert names["samples"].tokens.shape == (25, 16, 3) and names["gradient"].shape == (4, 3)


def test_the_loop_of_the_readme_is_eight_lines_that_learn(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [loop] = blocks((ROOT / "README.md").read_text())
    assert len(loop.split("\n\n")) == 2 and len(list(filter(None, loop.splitlines()))) == 8
    taken = []
    monkeypatch.setattr(
        dx.Policy, "step", lambda policy, *given, step=dx.Policy.step: taken.append(step(policy, *given))
    )
    exec(loop.replace("range(100)", "range(3)"), {})
    assert len(taken) == 3 and taken[-1]["actor/grad_norm"] > 0


def test_the_examples_of_the_page_call_what_there_is():
    of_class = {"policy": dx.Policy, "samples": dx.Samples, "result": dx.TrainResult}
    called = set()
    for call in ast.walk(ast.parse("".join(BLOCKS))):
        match call:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=name)) if owner in {"dx", *of_class}:
                given = [owner] * (owner in of_class) + call.args  # a method has itself
                function = getattr(of_class.get(owner, dx), name)
                inspect.signature(function).bind(*given, **{keyword.arg: 0 for keyword in call.keywords})
                called.add(name)
    assert called >= {"load_config", "train", "Policy", "generate", "step", "select", "policy", "policy_loss"}


def test_every_name_exists_is_documented_and_on_the_page():
    for name in dx.__all__:
        assert f"dx.{name}" in PAGE, name
        if callable(getattr(dx, name)):
            assert inspect.getdoc(getattr(dx, name)), name
    assert set(dx.__all__) <= set(dir(dx))
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        dx.nothing_of_this_name  # noqa: B018


def test_nothing_imports_a_module_that_would_take_the_place_of_a_name():
    """`import dapo_jax.train` would bind the module to the name of the function."""
    names = "|".join(name for name in dx.__all__ if name != "__version__")
    imports = re.compile(rf"^ *(from|import) dapo_jax(\.| import .*\b)({names})\b", re.M)
    assert imports.search("from dapo_jax import run, train") and imports.search("    import dapo_jax.train as t")
    assert not [path for path in Path(dx.__file__).parent.rglob("*.py") if imports.search(path.read_text())]
