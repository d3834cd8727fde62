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


@pytest.mark.parametrize("parameters", ["", "a, b, c, d, e", "text, solution", "completions, completion_ids"])
def test_a_function_of_no_form_is_named_with_its_parameters(parameters, own):
    with pytest.raises(ValueError) as error:
        own(f"def score({parameters}): return 1.0")
    assert "own.py:score' must be f(text, truth), f(data_source, solution, ground_truth, extra_info)" in str(
        error.value
    )
    assert f"takes ({parameters})" in str(error.value) or "takes completion_ids, and no token ids" in str(error.value)


@pytest.mark.parametrize(
    ("parameters", "wrong"),
    [
        ("prompt, completion", "prompt would get the solution"),
        ("prompt, response, ground_truth", "prompt would get the solution"),
        ("text, response", "response would get the ground_truth"),
        ("question, text, truth, info", "question would get the data_source"),
    ],
)
def test_a_parameter_that_would_get_something_else_than_its_name_says_is_refused(parameters, wrong, own):
    with pytest.raises(ValueError, match=rf"takes \({parameters}\), of which {wrong}: .* extra_info\['prompt'\]"):
        own(f"def score({parameters}): return 1.0")
    assert own("def score(response, answer): return response + answer")("d", "s", "t", {}) == "st"


def test_an_async_function_is_awaited_in_one_loop(own):
    code = "import asyncio\nloops = set()\nasync def score(text, truth):\n    await asyncio.sleep(0)\n"
    code += "    loops.add(asyncio.get_running_loop())\n    return len(loops) + 2.0 * (text == truth)"
    score = own(code)
    assert [score("any", "2", "2", {}), score("any", "3", "2", {})] == [3.0, 1.0], "clients that it keeps stay usable"


def test_the_form_of_trl_gets_lists_of_one_and_the_columns_that_it_names(own):
    info = {"prompt": [{"role": "user", "content": "1 + 1"}], "level": 3}
    score = own(
        "def score(prompts, completions, answer, level, **rest): return [(prompts, completions, answer, level)]"
    )
    said = [{"role": "assistant", "content": "2"}]
    assert score("sums", "2", "2", info) == ([info["prompt"]], [said], ["2"], [3])
    score = own("async def score(completions, ground_truth): return [float(completions == ground_truth)]")
    assert score("sums", "2", "2", {"prompt": "1 + 1"}) == 1.0, "a prompt that is text has a completion that is text"
    assert own("def score(completions, **columns): return [None]")("sums", "2", "2", info) is None
    with pytest.raises(TypeError, match="gets columns by name, and the row has no grade, only ground_truth, answer"):
        own("def score(completions, grade): return [1.0]")("sums", "2", "2", info)
    for result in ("1.0", "[1.0, 2.0]", "'a'"):
        with pytest.raises(TypeError, match="verifier must return a list of one score"):
            own(f"def score(completions): return {result}")("sums", "2", "2", info)


FOUR = "data_source, solution, ground_truth, extra_info"
OF_VERL = "data_source, solution_str, ground_truth, extra_info"


@pytest.mark.parametrize(
    ("parameters", "given", "expected"),  # the arguments: d, s, t and e
    [
        ("a, b, c, d", "a, b, c, d", "dste"),
        ("a, b, /, c, d", "a, b, c, d", "dste"),
        ("*, extra_info, text, truth, data_source", "data_source, text, truth, extra_info", "dste"),
        ("*arguments", "*arguments,", "dste"),
        ("a, b, c, d=None, e=3", "a, b, c, d", "dste"),
        ("data_source, solution, ground_truth, extra_info=None, **rest", FOUR, "dste"),
        ("source, solution_str, truth, info", "source, solution_str, truth, info", "dste"),
        ("data_source, solution_str, ground_truth, extra_info=None", OF_VERL, "dste"),
        ("solution_str, ground_truth, data_source, extra_info", OF_VERL, "dste"),
        ("*, extra_info, ground_truth, data_source, solution_str, **kwargs", OF_VERL, "dste"),
        ("**named", f"*map(named.get, {OF_VERL.split(', ')}),", "dste"),
        ("text", "text,", "s"),
        ("a, b", "a, b", "st"),
        ("text, truth", "text, truth", "st"),
        ("a, b, c", "a, b, c", "ste"),
        ("text, extra_info", "text, extra_info", "se"),
        ("ground_truth, text", "ground_truth, text", "ts"),
        ("solution_str, ground_truth", "solution_str, ground_truth", "st"),
        ("text, strict=True", "text, strict", ("s", True)),
        ("solution, ground_truth, extra_info=None", "solution, ground_truth, extra_info", "ste"),
    ],
)
def test_a_function_gets_its_arguments_by_name_and_then_by_order(parameters, given, expected, own):
    assert own(f"def score({parameters}): return {given}")("d", "s", "t", "e") == tuple(expected)


def test_a_file_finds_the_modules_in_its_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "neighbour_of_reward.py").write_text("ONE = 1.0")
    (tmp_path / "my-reward.v2.py").write_text(
        "from neighbour_of_reward import ONE\nfrom .neighbour_of_reward import ONE as SAME\n"
        "def score(*arguments): return ONE + SAME"
    )
    assert load_function(f"{tmp_path}/my-reward.v2.py:score")("", "", "", {}) == 2.0


def test_files_of_two_folders_each_import_their_own_neighbours(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "b")])
    for folder, value in {"a": 1.0, "b": 2.0}.items():
        (tmp_path / folder / "namesakes").mkdir(parents=True)
        (tmp_path / folder / "namesakes" / "__init__.py").write_text("")
        (tmp_path / folder / "namesakes" / "part.py").write_text(f"ONE = {value}")
        (tmp_path / folder / f"only_{folder}.py").write_text("calls = []")
        code = f"import only_{folder}\nfrom namesakes.part import ONE\ndef score(*arguments): return ONE"
        (tmp_path / folder / "own.py").write_text(code)
    first, second, again = (load_function(f"{tmp_path}/{folder}/own.py:score") for folder in "aba")
    assert [one("", "", "", {}) for one in (first, second, again)] == [1.0, 2.0, 1.0]
    assert {"only_a", "only_b"} <= sys.modules.keys(), "what has one name is kept"


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
