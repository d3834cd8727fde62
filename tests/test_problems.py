"""What is trained on and measured: task sets and their options."""

import dataclasses
import json
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from small_run import small_config, sums

from dapo_jax.command.tasks import held_out_options, parse_tasks
from dapo_jax.data.prompts import PromptSet
from dapo_jax.data.rows import PromptRow
from dapo_jax.data.tokenizer import character_tokenizer
from dapo_jax.monitor.records import to_json_line
from dapo_jax.run.held_out import HeldOut
from dapo_jax.run.problems import TaskSet, read_problems
from dapo_jax.training.summary import results


def config_with(tasks, **changes):
    text = tasks if isinstance(tasks, str) else json.dumps(tasks)
    return small_config("unused", **{"evaluate.tasks": text, **changes})


def held_out_of(config):
    return held_out_options(config.data, config.evaluate, config.reward)


def tasks_of(config):
    return parse_tasks(config.evaluate.tasks, held_out_of(config))


def test_a_task_set_has_the_held_out_problems_options_unless_it_has_its_own():
    aime, greedy = tasks_of(
        config_with(
            {"aime": {"files": "a.jsonl", "n": 32}, "greedy": {"files": ["a.jsonl", "b.jsonl"], "temperature": 0}},
            **{"evaluate.top_p": 0.7, "reward.function": "math_dapo"},
        )
    )
    assert (aime.name, aime.files, aime.n, aime.temperature) == ("aime", ("a.jsonl",), 32, 1.0)
    assert (greedy.files, greedy.n, greedy.temperature) == (("a.jsonl", "b.jsonl"), 4, 0)
    assert {task.top_p for task in (aime, greedy)} == {0.7}
    assert {task.reward_function for task in (aime, greedy)} == {"math_dapo"}


def test_what_is_wrong_with_tasks_is_named():
    for tasks, message in (
        ("{", "must be JSON"),
        ("[]", "must be a JSON object"),
        ({"a": 3}, "an object of options"),
        ({"": {"files": "f"}}, "must have a name"),
        ({"a": {}}, "'a': files=None must be a path"),
        ({"a": {"files": [1]}}, "must be a path or a list of paths"),
        ({"a": {"files": 1}}, "files=1 must be a path"),
        ({"a": {"files": "f", "N": 3}}, "'N' is not an option: choose one of files"),
        ({"a": {"files": "f", "name": "b"}}, "'name' is not an option"),
        ({"a": {"files": "f", "n": "3"}}, "n='3' must be a whole number"),
        ({"a": {"files": "f", "n": True}}, "n=True must be a whole number"),
        ({"a": {"files": "f", "temperature": "hot"}}, "temperature='hot' must be a number"),
    ):
        with pytest.raises(ValueError, match=message):
            tasks_of(config_with(tasks))


def test_auto_is_the_verifier_of_the_data_if_there_is_only_one(tmp_path):
    """Else its processes would load a library for mathematics that nothing needs."""

    def functions(**sources):
        tasks = {name: {"files": write_rows(tmp_path / f"{name}.jsonl", source)} for name, source in sources.items()}
        problems = read_problems(config_with(tasks), character_tokenizer())
        return {function for _, function in problems.by_function()}

    assert functions() == functions(words="mawps") == {"arithmetic"}
    assert functions(words="mawps", school="openai/gsm8k") == {"auto"}


def test_a_prompt_that_is_repeated_is_one_problem_with_more_samples():
    rows = [PromptRow(*row, {}) for row in (("p", "s", "1"), ("q", "t", "1"), ("p", "s", "1"), ("p", "s", "2"))]
    held_out = TaskSet(held_out_of(config_with("{}")), PromptSet(rows, [[1]] * 4))
    assert held_out.by_name == [("s", [[0, 2], [3]]), ("t", [[1]])]


def write_rows(path, source="arithmetic", prompts=("1 + 1 =", "2 + 0 =")):
    rows = [
        {"prompt": prompt, "data_source": source, "reward_model": {"ground_truth": "2"}, "extra_info": None}
        for prompt in prompts
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_task_sets_are_read_with_the_held_out_problems(tmp_path):
    file = write_rows(tmp_path / "two.jsonl")
    tasks = {"one": {"files": file, "max_prompts": 1}, "twice": {"files": [file, file], "reward_function": "gsm8k"}}
    problems = read_problems(config_with(tasks), character_tokenizer())
    sets = problems.task_sets
    assert len(problems.train_set) and [task.options.name for task in sets] == ["", "one", "twice"]
    assert [len(task.prompts) for task in sets] == [4, 1, 4]
    assert [[len(rows) for rows in problems] for _, problems in sets[2].by_name] == [[2, 2]]
    again = read_problems(config_with(tasks), character_tokenizer(), training=False)
    assert not len(again.train_set) and [len(task.prompts) for task in again.task_sets] == [4, 1, 4]


def test_what_a_template_makes_is_a_message_or_plain_text_without_a_chat_template(tmp_path):
    file, model = write_rows(tmp_path / "two.jsonl"), character_tokenizer()
    tasks = {"own": {"files": file, "prompt_template": "{prompt}"}}
    for tokenizer, kind in (model, tuple), (dataclasses.replace(model, chat_template=None), str):
        config = config_with(tasks, **{"data.arithmetic.num_heldout": 0})
        [own] = read_problems(config, tokenizer, training=False).task_sets
        assert isinstance(own.prompts.rows[0].prompt, kind) and own.prompts.rows[0].question == "1 + 1 ="


def test_columns_of_tasks_and_files_of_a_mixture_that_are_not_there_are_refused(tmp_path):
    with pytest.raises(ValueError, match="'a': prompt_key is not read with a prompt_template: leave it out"):
        tasks_of(config_with({"a": {"files": "f", "prompt_key": "q", "prompt_template": "{q}"}}))
    files = [write_rows(tmp_path / "a.jsonl"), write_rows(tmp_path / "long.jsonl", prompts=["1" * 99])]
    changes = {"data.task": "files", "data.train_files": files, "data.mixture": [1.0, 2.0]}
    with pytest.raises(ValueError, match="data.mixture: .*long.jsonl must have a prompt to train on, and has none"):
        read_problems(config_with("{}", **changes, **{"data.filter_overlong_prompts": True}), character_tokenizer())


def test_sources_of_which_max_prompts_leaves_nothing_are_named(tmp_path, caplog):
    files = [write_rows(tmp_path / "a.jsonl"), write_rows(tmp_path / "b.jsonl", "other")]
    for most, named in ((1, True), (3, False)):
        caplog.clear()
        task = {"files": files, "max_prompts": most, "reward_function": "gsm8k"}
        [*_, measured] = read_problems(config_with({"both": task}), character_tokenizer()).task_sets
        assert len(measured.prompts) == most
        assert ("max_prompts=1 leaves out all rows of other: raise it" in caplog.text) == named


def test_a_row_without_a_hint_is_refused_before_it_is_drawn(tmp_path):
    rows = [*sums(1, 2), {**sums(3)[0], "reward_model": {"ground_truth": None}}]
    (tmp_path / "a.jsonl").write_text("".join(map(to_json_line, rows)))
    files = {"data.task": "files", "data.train_files": [str(tmp_path / "a.jsonl")], "reward.function": "own.py:score"}
    with pytest.raises(ValueError, match="a.jsonl row 3 needs extra_info.solution or a ground truth for the hint"):
        read_problems(config_with("{}", **files, **{"algorithm.adv_estimator": "cpo"}), character_tokenizer())
    read_problems(config_with("{}", **files), character_tokenizer())


def test_a_repeated_row_is_named_and_changes_no_metrics_name(tmp_path, caplog):
    once, twice = (write_rows(tmp_path / f"{n}.jsonl", prompts=("1 + 1 =", "2 + 0 =", "2 + 0 =")[:n]) for n in (2, 3))
    for files, repeated in ([once], False), ([twice], True), ([once, once], False):
        caplog.clear()
        found = read_problems(config_with({"sums": {"files": files}}), character_tokenizer()).task_sets
        warned = [message for message in caplog.messages if "named by the fewest samples" in message]
        assert results(found)[-1] == f"eval/sums/acc/mean@{4 * (len(files) if not repeated else 1)}"
        assert bool(warned) == repeated and all("3.jsonl row 3 repeats" in message for message in warned)


def test_a_name_or_a_source_that_does_not_fit_is_refused(tmp_path):
    file = write_rows(tmp_path / "two.jsonl")
    with pytest.raises(ValueError, match="'arithmetic' must not be a data_source"):
        read_problems(config_with({"arithmetic": {"files": file}}), character_tokenizer())
    foreign = {"other": {"files": write_rows(tmp_path / "other.jsonl", "strange"), "reward_function": "auto"}}
    with pytest.raises(ValueError, match="'strange' has no verifier"):
        read_problems(config_with(foreign), character_tokenizer())
    foreign["other"]["reward_function"] = "gsm8k"
    read_problems(config_with(foreign), character_tokenizer())


def test_accuracies_under_another_judge_environment_or_format_are_not_compared():
    def checksum(*, plays=False, **changes):
        config = config_with("{}", **changes)
        environments = SimpleNamespace(settings=config.environment) if plays else None
        sampler: Any = SimpleNamespace(stop=(), environments=environments)
        rewards: Any = SimpleNamespace(settings=config.reward, max_response_length=4, judge=object())
        return HeldOut((), sampler, rewards, False, False, False, nullcontext).checksum()

    others = {
        "reward.judge.threshold": 0.9,
        "reward.judge.model": "another",
        "reward.format.pattern": "a+",
        "reward.error_score": -1.0,
        "reward.keep_special_tokens": True,
        "reward.model.weight": 0.1,
    }
    assert len({checksum(), *(checksum(**{name: value}) for name, value in others.items())}) == 1 + len(others)
    assert checksum(plays=True) != checksum(plays=True, **{"environment.max_turns": 1})
    for name, value in (
        ("reward.judge.timeout_s", 3.0),
        ("reward.judge.base_url", "http://b"),
        ("reward.num_workers", 3),
    ):
        assert checksum(**{name: value}) == checksum()
    assert checksum(plays=True) == checksum(plays=True, **{"environment.num_workers": 5})
