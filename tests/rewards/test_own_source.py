"""Functions of a notebook, a script or the prompt become files that a verifier process can read."""

import importlib
import linecache
import sys
import types
from pathlib import Path

import pytest

from dapo_jax.rewards.gsm8k import score as of_module
from dapo_jax.rewards.own_function import load_function, taken
from dapo_jax.rewards.own_source import reward_name
from dapo_jax.rewards.worker_pool import ScoreRequest, VerifierPool

CELL = (Path(__file__).parent / "data" / "notebook_cell.txt").read_text()


@pytest.fixture(scope="module")
def notebook():
    """The namespace of a session that has run a cell."""
    name = "<cell 1>"
    linecache.cache[name] = (len(CELL), None, CELL.splitlines(keepends=True), name)
    session = types.ModuleType("__main__")
    exec(compile(CELL, name, "exec"), vars(session))
    return session


def score(name, solution="so 34", ground_truth="34"):
    return load_function(name)("any", solution, ground_truth, {"n": 3})


def test_a_function_of_a_module_keeps_its_path(tmp_path):
    assert reward_name(of_module, tmp_path) == "dapo_jax.rewards.gsm8k.score"
    assert not list(tmp_path.iterdir())


def test_a_function_of_a_session_is_written_with_all_that_it_uses(notebook, tmp_path):
    name = reward_name(notebook.four, tmp_path)
    assert name == f"{tmp_path}/reward_function.py:four"
    with VerifierPool(name, num_workers=1, timeout_s=30) as pool:
        right, wrong = pool.score([ScoreRequest("any", text, "34", {"n": 3}) for text in ("so 34", "none")])
    assert right.numbers == {"score": 1.0, "acc": 1.0, "words": 2.0} and wrong.numbers["score"] == -1.0


def test_modules_of_a_package_are_imported_too(notebook, tmp_path):
    assert score(reward_name(notebook.tagged, tmp_path), "<b/>") == 1.0


def test_functions_of_fewer_arguments_get_a_wrapper(notebook, tmp_path):
    one, two = reward_name(notebook.one, tmp_path, "even"), reward_name(notebook.two, tmp_path, "right")
    assert (score(one, "abcd"), score(one, "abc")) == (1.0, 0.0)
    assert (score(two), score(two, "35")) == (1.0, 0.0)


def test_a_function_of_a_module_with_fewer_arguments_is_imported(tmp_path, monkeypatch):
    (tmp_path / "module_of_mine.py").write_text("opened = open('/dev/null')\ndef brief(text): return len(text)")
    monkeypatch.syspath_prepend(tmp_path)
    name = reward_name(importlib.import_module("module_of_mine").brief, tmp_path / "run")
    monkeypatch.delitem(sys.modules, "module_of_mine")
    assert score(name) == 5


def test_a_function_in_a_function_is_written_if_it_stands_alone(notebook, tmp_path):
    closure, free = notebook.outer()
    assert reward_name(closure, tmp_path) is None
    assert score(reward_name(free, tmp_path)) == 3.0


def test_what_cannot_be_written_has_no_name(notebook, tmp_path):
    for function in (notebook.reads_file, notebook.counts, notebook.absent, notebook.uses_lambda, notebook.short):
        assert reward_name(function, tmp_path) is None, function
    assert reward_name(notebook.Judge().method, tmp_path) is None
    assert not list(tmp_path.iterdir())


def test_arguments_go_by_name_and_then_by_order():
    solution, truth, info = "solution", "ground_truth", "extra_info"
    for function, expected in (
        (lambda text: 0, (solution,)),
        (lambda a, b: 0, (solution, truth)),
        (lambda a, b, c: 0, (solution, truth, info)),
        (lambda text, extra_info: 0, (solution, info)),
        (lambda ground_truth, text: 0, (truth, solution)),
        (lambda solution_str, ground_truth: 0, (solution, truth)),
        (lambda text, strict=True: 0, (solution,)),
        (lambda solution, ground_truth, extra_info=None: 0, (solution, truth, info)),
        (lambda a, b, c, d: 0, ("data_source", solution, truth, info)),
        (lambda data_source, solution_str, ground_truth, extra_info=None: 0, ("data_source", solution, truth, info)),
    ):
        assert tuple(taken("own", function).values()) == expected
    for function in (lambda: 0, lambda a, b, c, d, e: 0, lambda text, solution: 0):
        with pytest.raises(ValueError, match="own must be f.text, truth."):
            taken("own", function)
