"""The names of `import dapo_jax`, and their page."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dapo_jax as dx

PAGE = (Path(__file__).parents[2] / "docs/api.md").read_text()


def test_the_examples_of_the_page_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S):
        exec(block, names)
    assert (
        len(names["accuracies"]) == 2 and names["result"].stopped == "" and names["samples"].tokens.shape == (25, 16, 4)
    )
    assert names["gradient"].shape == (4, 3)


def test_every_name_exists_is_documented_and_on_the_page():
    for name in dx.__all__:
        assert f"dx.{name}" in PAGE, name
        if callable(getattr(dx, name)):
            assert inspect.getdoc(getattr(dx, name)), name
    assert set(dx.__all__) <= set(dir(dx))
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        dx.nothing_of_this_name  # noqa: B018


def test_the_import_loads_nothing():
    code = "import sys, dapo_jax; assert not {'jax', 'numpy', 'flax', 'dapo_jax.config'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_module_takes_the_place_of_a_name():
    """`import dapo_jax.train` would bind the module to the name of the function."""
    code = (
        "import sys, dapo_jax as dx\n"
        "for name in dx.__all__: getattr(dx, name)\n"
        "assert not [name for name in dx.__all__ if f'dapo_jax.{name}' in sys.modules]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
