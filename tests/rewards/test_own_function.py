import sys

import pytest

from dapo_jax.rewards.own_function import load_function


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Loads a function of a file with this code."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def load(code, name="score"):
        (tmp_path / "own.py").write_text(code)
        return load_function(f"{tmp_path}/own.py:{name}")

    return load


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
def test_a_function_that_cannot_be_called_is_named_with_its_parameters(parameters, reason, own):
    with pytest.raises(ValueError) as error:
        own(f"def score({parameters}): return 1.0")
    assert reason in str(error.value) and f"takes ({parameters})" in str(error.value)
    assert "must be score(data_source, solution, ground_truth, extra_info) -> float | dict" in str(error.value)


def test_an_async_function_is_refused(own):
    code = "async def score(*a): return 1.0\nclass Judge:\n  async def __call__(self, *a): return 1.0\njudge = Judge()"
    for name in ("score", "judge"):
        with pytest.raises(ValueError, match="it is async: write a plain function"):
            own(code, name)


@pytest.mark.parametrize(
    ("parameters", "given"),
    [
        ("a, b, c, d", "a, b, c, d"),
        ("*arguments", "arguments"),
        ("a, b, c, d=None, e=3", "a, b, c, d"),
        (
            "data_source, solution, ground_truth, extra_info=None, **rest",
            "data_source, solution, ground_truth, extra_info",
        ),
        ("source, solution_str, truth, info", "source, solution_str, truth, info"),
        *(
            (names, "data_source, solution_str, ground_truth, extra_info")  # those of verl
            for names in (
                "data_source, solution_str, ground_truth, extra_info=None",
                "solution_str, ground_truth, data_source, extra_info",
                "*, extra_info, ground_truth, data_source, solution_str, **kwargs",
            )
        ),
        ("**named", "named['data_source'], named['solution_str'], named['ground_truth'], named['extra_info']"),
    ],
)
def test_a_function_gets_its_four_arguments_in_order_or_by_the_names_of_verl(parameters, given, own):
    score = own(f"def score({parameters}): return {given}")
    assert score("source", "solution", "truth", {}) == ("source", "solution", "truth", {})


def test_a_file_finds_the_modules_in_its_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
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
        ("fails.score", "does not load: importing 'fails' failed with ZeroDivisionError"),
        ("exits.score", "does not load: importing 'exits' failed with SystemExit"),
        ("math.no_such_function", "must be a path .*'math' has no function 'no_such_function'"),
        ("math.pi", "must be a path .*'math' has no function 'pi'"),
    ],
)
def test_what_cannot_be_loaded_is_named_with_the_cure(name, reason, tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text("ONE = 1\ndef score(*a): return 1.0\ndef other(*a): return 1.0")
    (tmp_path / "imports.py").write_text("import no_such_package.part")
    (tmp_path / "fails.py").write_text("1 / 0")
    (tmp_path / "exits.py").write_text("raise SystemExit")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.syspath_prepend(tmp_path)
    name = name.replace("DIR", str(tmp_path))
    with pytest.raises(ValueError, match=f"reward.function='{name}' .*{reason.replace('DIR', str(tmp_path))}"):
        load_function(name)
