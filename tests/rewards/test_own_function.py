import sys

import pytest

from dapo_jax.rewards.own_function import load_function


@pytest.fixture(autouse=True)
def _own_path(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ("solution, ground_truth", "cannot be called with four positional arguments"),
        ("*, data_source, solution, ground_truth, extra_info", "cannot be called with four positional arguments"),
        ("a, b, c, d, e", "cannot be called with four positional arguments"),
        ("solution_str, ground_truth", "cannot be called with the names data_source, solution_str"),
        ("completions, **kwargs", "as TRL's reward functions do: wrap it"),
        ("prompts, completions, ground_truth, extra", "as TRL's reward functions do: wrap it"),
    ],
)
def test_a_function_that_cannot_be_called_is_named_with_its_parameters(parameters, reason, tmp_path):
    (tmp_path / "own.py").write_text(f"def score({parameters}): return 1.0")
    with pytest.raises(ValueError) as error:
        load_function(f"{tmp_path}/own.py:score")
    assert reason in str(error.value) and f"takes ({parameters})" in str(error.value)
    assert "must be score(data_source, solution, ground_truth, extra_info) -> float | dict" in str(error.value)


def test_an_async_function_is_refused(tmp_path):
    code = "async def score(*a): return 1.0\nclass Judge:\n  async def __call__(self, *a): return 1.0\njudge = Judge()"
    (tmp_path / "own.py").write_text(code)
    for name in ("score", "judge"):
        with pytest.raises(ValueError, match="it is async: write a plain function"):
            load_function(f"{tmp_path}/own.py:{name}")


@pytest.mark.parametrize(
    "parameters",
    [
        "a, b, c, d",
        "*arguments",
        "a, b, c, d=None, e=3",
        "data_source, solution, ground_truth, extra_info=None, **rest",
        "source, solution_str, truth, info",
    ],
)
def test_a_function_that_takes_four_arguments_is_given_them_in_order(parameters, tmp_path):
    (tmp_path / "own.py").write_text(f"def score({parameters}): return list(locals().values())")
    given = load_function(f"{tmp_path}/own.py:score")("source", "solution", "truth", {})
    assert (given[0] if parameters == "*arguments" else tuple(given[:4])) == ("source", "solution", "truth", {})


@pytest.mark.parametrize(
    "parameters",
    [
        "data_source, solution_str, ground_truth, extra_info=None",
        "solution_str, ground_truth, data_source, extra_info",
        "*, extra_info, ground_truth, data_source, solution_str, **kwargs",
    ],
)
def test_a_function_with_the_names_of_verl_is_called_by_them(parameters, tmp_path):
    (tmp_path / "own.py").write_text(
        f"def score({parameters}): return data_source, solution_str, ground_truth, extra_info"
    )
    assert load_function(f"{tmp_path}/own.py:score")("a", "b", "c", {}) == ("a", "b", "c", {})


def test_a_function_of_names_alone_is_called_by_those_of_verl(tmp_path):
    (tmp_path / "own.py").write_text("def score(**named): return named['solution_str'], named['ground_truth']")
    assert load_function(f"{tmp_path}/own.py:score")("a", "b", "c", {}) == ("b", "c")


def test_a_file_finds_the_modules_in_its_folder(tmp_path):
    (tmp_path / "neighbour_of_reward.py").write_text("ONE = 1.0")
    (tmp_path / "my-reward.v2.py").write_text(
        "from neighbour_of_reward import ONE\nfrom .neighbour_of_reward import ONE as SAME\n"
        "def score(*arguments): return ONE + SAME"
    )
    assert load_function(f"{tmp_path}/my-reward.v2.py:score")("", "", "", {}) == 2.0


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("DIR/own.py", "add the name of the function, DIR/own.py:FUNCTION"),
        ("DIR/own.py:scores", r"has no function 'scores' \(it has score, other\): correct the path"),
        ("DIR/own.py:ONE", "has no function 'ONE'"),
        ("DIR/no.py:score", "but the file DIR/no.py does not exist: correct the path"),
        ("DIR/imports.py:score", "'DIR/imports.py' imports 'no_such_package', which is not installed.*pip install no_"),
        ("imports.score", "'imports' imports 'no_such_package', which is not installed"),
        ("no_such_module.score", "module 'no_such_module' does not exist: .* or give its file as FILE.py:function"),
        ("xml.no_such_module.score", "module 'xml.no_such_module' does not exist"),
        ("DIR/fails.py:score", "importing 'DIR/fails.py' failed with ZeroDivisionError"),
    ],
)
def test_what_cannot_be_loaded_is_named_with_the_cure(name, reason, tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text("ONE = 1\ndef score(*a): return 1.0\ndef other(*a): return 1.0")
    (tmp_path / "imports.py").write_text("import no_such_package.part")
    (tmp_path / "fails.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    name = name.replace("DIR", str(tmp_path))
    with pytest.raises(ValueError, match=f"reward.function='{name}' .*{reason.replace('DIR', str(tmp_path))}"):
        load_function(name)
