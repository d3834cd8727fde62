"""Episodes in whole runs of a random two-layer model: exact, whatever the environment's timing."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from environments.played import Desk, Sums
from rollout.test_returns import turns_of
from small_run import assert_same_policy, resumed, rows_without_clock, small_config, sums

import dapo_jax as dx
from dapo_jax.command.validation import validate
from dapo_jax.environments.episodes import seed_of
from dapo_jax.environments.protocol import Reply
from dapo_jax.errors import InputError
from dapo_jax.evaluate.evaluate import bench
from dapo_jax.monitor.records import read_metrics
from dapo_jax.parallel.processes import SharedFailure
from dapo_jax.training.loop import train

FILE = Path(__file__).with_name("played.py")
STEPS = {"trainer.total_training_steps": 2, "trainer.val_before_train": False, "trainer.test_freq": -1}
LONG = {"data.max_response_length": 24, "environment.turn_template": "\n{observation} ="}


def config_of(folder, name="Sums", *, arguments=None, **changes):
    options = {"environment.path": f"{FILE}:{name}", "environment.num_workers": 1, **LONG}
    options |= {"environment.arguments": json.dumps(arguments)} if arguments else {}
    return small_config(folder, **{**options, **changes})


@functools.cache
def generated(**changes):
    """Episodes to three sums."""
    with dx.Policy(config_of("unused", **changes)) as policy:
        return policy.generate([[{"role": "user", "content": f"{n} + 1 ="}] for n in range(3)], n=4, environment=Sums)


def without_episodes(rows):
    own = "environment/", "num_turns", "observation_tokens"
    return [{name: value for name, value in row.items() if not any(part in name for part in own)} for row in rows]


@pytest.mark.slow
def test_an_episode_of_one_turn_equals_the_plain_run_to_the_bit(tmp_path):
    function = {"reward.function": f"{FILE}:score"}
    expected = train(small_config(tmp_path / "plain", **STEPS, **function))
    found = train(config_of(tmp_path / "episodes", "OneTurn", **{**STEPS, "data.max_response_length": 4}))
    assert_same_policy(found, jax.device_get(expected.actor.params))
    plain, rows = (rows_without_clock(tmp_path / name) for name in ("plain", "episodes"))
    assert without_episodes(rows) == plain
    assert rows[-1]["rollout/num_turns/mean"] == 1 and rows[-1]["environment/ended_by_done"] > 0


def test_what_the_environment_said_is_in_the_chat_and_not_the_policys():
    samples = generated()
    given = samples.mask & ~samples.by_policy
    assert given.any() and not samples.logprobs[given].any() and (samples.logprobs[samples.by_policy] < 0).all()
    assert samples.scores["observation_tokens"].tolist() == given.sum(axis=-1).tolist()
    turns = samples.scores["num_turns"]
    assert (
        turns.max() == 3
        and turns.min() >= 1
        and set(samples.scores) == {*("score", "acc", "num_turns", "observation_tokens")}
    )
    arrays = (array.reshape(12, -1) for array in (samples.tokens, samples.by_policy, given))
    for tokens, own, said in zip(*arrays, strict=True):
        starts = np.flatnonzero(said & ~np.roll(said, 1))
        assert all(tokens[start - 1] == 1 and own[start - 1] for start in starts), "after the end of a turn"


@pytest.mark.slow
def test_slots_and_chunks_change_no_token_or_reward():
    expected = generated()
    for changes in (
        {"rollout.n": 4, "rollout.max_num_seqs": 8},
        {"rollout.decode_chunk_length": 4, "environment.num_workers": 3},
        {"environment.max_turn_length": 25},  # more than a response may have
    ):
        found = generated(**changes)
        for name in ("tokens", "mask", "by_policy", "finished"):
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), name)
        np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-5)
        np.testing.assert_equal(found.scores, expected.scores)


@pytest.mark.slow
def test_a_turn_that_reaches_its_limit_ends_the_episode_and_is_answered():
    most, cut = 8, 0
    whole, found = generated(), generated(**{"environment.max_turn_length": most})
    for row in np.ndindex(whole.mask.shape[:2]):
        ends = [begin + most for begin, end in turns_of(whole.by_policy[row]) if end - begin > most]
        length = min([whole.mask[row].sum(), *ends])
        np.testing.assert_array_equal(found.tokens[row][found.mask[row]], whole.tokens[row][:length])
        assert found.scores["num_turns"][row] == len(turns_of(found.by_policy[row])), "the last turn is answered"
        cut += bool(ends)
    assert not found.finished.any() and 0 < cut < whole.finished.size


@pytest.mark.slow
def test_a_tool_that_sleeps_for_random_times_changes_no_bit_and_a_killed_run_resumes(tmp_path, monkeypatch):
    quick = train(config_of(tmp_path / "quick", **STEPS))
    slow = train(config_of(tmp_path / "slow", arguments={"most_s": 0.02}, **{**STEPS, "environment.num_workers": 4}))
    assert_same_policy(slow, jax.device_get(quick.actor.params))
    rows, expected = (rows_without_clock(tmp_path / name) for name in ("slow", "quick"))
    assert rows == expected and rows[-1]["rollout/num_turns/mean"] > 1
    changes = {"environment.path": f"{FILE}:Sums", "environment.arguments": '{"most_s": 0.02}', **LONG}
    resumed(tmp_path, monkeypatch, {**changes, "trainer.total_training_steps": 4})


@pytest.mark.slow
def test_the_first_observation_joins_the_prompt_and_evaluation_plays_episodes_too(tmp_path):
    arguments = {"first": "now: "}
    evaluated = {"trainer.total_training_steps": 1, "trainer.test_freq": 1, "trainer.val_before_train": False}
    train(config_of(tmp_path, arguments=arguments, **{**evaluated, "monitor.num_samples": 2}))
    row = read_metrics(tmp_path)[-1]
    assert row["eval/arithmetic/num_turns/mean@4"] > 1 and row["rollout/acc/mean"] >= 0
    text = (tmp_path / "samples" / "1.jsonl").read_text() if (tmp_path / "samples" / "1.jsonl").exists() else ""
    assert not text or "now: " in text
    config = config_of(tmp_path / "later", arguments=arguments, **{"model.path": str(tmp_path)})
    (found,) = bench(config, tmp_path / "bench")
    assert found["metrics"]["bench/arithmetic/num_turns/mean@4"] > 1


@pytest.mark.slow
def test_tools_without_rewards_leave_them_to_the_reward_function(tmp_path):
    changes = {"environment.tools": (f"{FILE}:twice",), "environment.path": "", "reward.function": f"{FILE}:score"}
    train(config_of(tmp_path, **{**STEPS, **changes, "trainer.total_training_steps": 1}))
    row = read_metrics(tmp_path)[-1]
    assert row["rollout/num_turns/mean"] == 1 and row["rollout/score/max"] >= 0 and row["environment/calls"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("length", [0, 12], ids=["whole", "segments"])
def test_reward_functions_are_told_what_the_environment_asks_and_held_out_seeds_are_others(tmp_path, length):
    """Before, they had the row's prompt alone, and held-out episodes the seeds of the first training prompts."""
    options = {"reward.function": f"{FILE}:heard", "data.max_prompt_length": 24, "trainer.test_freq": 2}
    of_filter = {"rule": "mean_range", "filter_low": -9.0, "filter_high": 9.0}
    of_filter |= {"leftover": "carry", "leftover_max_staleness": 2} if length else {}
    options |= {f"algorithm.filter_groups.{name}": value for name, value in of_filter.items()}
    options |= {"rollout.n": 2, "rollout.segment_length": length}
    config = config_of(tmp_path, "Asks", **{**STEPS, **options})
    train(config)
    row, seeds = read_metrics(tmp_path)[-1], functools.partial(seed_of, config.seed)
    assert row["rollout/score/min"] == 1 == row["eval/arithmetic/score/mean@4"]
    held_out = [seeds(n, held_out=True) % 1000 for n in range(int(row["eval/arithmetic/finished_task_count"]))]
    assert row["eval/arithmetic/number/mean@4"] == pytest.approx(np.mean(held_out))
    assert row["rollout/number/max"] in [seeds(n) % 1000 for n in range(100)]


@pytest.mark.slow
def test_a_group_in_which_the_environment_fails_is_left_out_and_if_all_do_the_run_ends(tmp_path, monkeypatch):
    once = {**STEPS, "rollout.n": 2, "trainer.total_training_steps": 1}  # a fault starts a process: .5 s
    every = " ".join(map(str, range(20)))
    with pytest.raises(InputError, match="failed on a trial episode for .* with RuntimeError: out of order"):
        train(config_of(tmp_path / "refused", arguments={"fails_on": every}, **once))
    monkeypatch.setattr("dapo_jax.run.parts.try_on", lambda *given: [Reply()])
    train(config_of(tmp_path / "some", arguments={"fails_on": "1 2 3"}, **once))
    row = read_metrics(tmp_path / "some")[-1]
    assert row["environment/faults"] > 0 and row["environment/ended_by_fault"] > 0 and row["reward/num_missing"] > 0
    with pytest.raises(SharedFailure, match="the environment failed on all .* with RuntimeError: out of order"):
        train(config_of(tmp_path / "all", arguments={"fails_on": every}, **once))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm.adv_estimator": "cpo"}, "adv_estimator=cpo writes prompts of its own"),
        ({"environment.path": "Lake"}, "environment.path='Lake' must be FILE.py:CLASS"),
        ({"environment.tools": ("twice",)}, "environment.tools='twice' must be FILE.py:FUNCTION"),
        (
            {"environment.max_turn_length": 3, "rollout.min_response_length": 3},
            "must be more than rollout.min_",
        ),
        ({"environment.path": "", "environment.max_turns": 2}, "is not read without environment.path or"),
        ({"environment.path": '{"a": "Lake"}'}, "environment.path='Lake' must be FILE.py:CLASS"),
        ({"environment.path": '{"a b": "lake.py:Lake"}'}, "must be a class, or a JSON object of classes by names"),
        ({"environment.path": "{"}, "must be a class, or a JSON object of classes by names"),
        ({"environment.path": "python:Gone"}, "environment.path='python:Gone' is a function of the Python session"),
    ],
)
def test_what_does_not_go_together_is_refused_before_a_device(changes, message):
    with pytest.raises(InputError, match=message):
        validate(config_of("unused", **changes))


def test_rewards_of_the_environment_and_of_a_function_exclude_each_other(tmp_path):
    with pytest.raises(InputError, match="which gives rewards itself"):
        train(config_of(tmp_path, **{"reward.function": f"{FILE}:score"}))
    task = {"files": str(tmp_path / "rows.jsonl"), "reward_function": f"{FILE}:score"}
    with pytest.raises(InputError, match="evaluate.tasks, 'more': reward_function must not be given with"):
        train(config_of(tmp_path, **{"evaluate.tasks": json.dumps({"more": task})}))
    with dx.Policy(config_of("unused")) as policy, pytest.raises(InputError, match="max_tokens=3 does not go with"):
        policy.generate(["1 + 1 ="], environment=Sums, max_tokens=3)


@pytest.mark.slow
def test_train_takes_a_class_and_functions(tmp_path):
    class Local(Sums):
        pass

    config = config_of(tmp_path, **{**STEPS, "environment.path": "", "trainer.total_training_steps": 1})
    result = dx.train(config, environment=Local)
    assert result.config.environment.path == "python:Local" and result.records[-1]["environment/calls"] > 0
    with pytest.raises(InputError, match="tools must be a list of functions"):
        dx.train(config, tools=print)  # pyright: ignore[reportArgumentType]


def of_environments(*names):
    """Rows of these environments, in turn."""
    return [
        {**row, "environment": name, "hint": name} for row, name in zip(sums(*range(len(names))), names, strict=True)
    ]


def several(folder, arguments):
    """Options of a run whose rows name one of two environments, which differ in their number of turns."""
    file, count = folder / "several.jsonl", 8
    file.write_text("".join(json.dumps(row) + "\n" for row in of_environments(*["one", "three"] * (count // 2))))
    given = {"one": {**arguments, "turns": 1}, "three": arguments}
    return {
        "data.task": "files",
        "data.train_files": (str(file),),
        "environment.path": json.dumps(dict.fromkeys(given, f"{FILE}:Sums")),
        "environment.arguments": json.dumps(given),
    }


@pytest.mark.slow
def test_rows_name_one_of_several_environments_each_with_metrics_of_its_own(tmp_path):
    both, changes = {"sums": Sums, "desk": Desk}, {**STEPS, "trainer.test_freq": 2}
    arguments = {"environment.arguments": json.dumps({"sums": {"turns": 2}}), "data.task": "files"}
    config = config_of(tmp_path, **{**changes, **arguments, "environment.path": ""})
    rows = {"data": of_environments(*["sums", "desk"] * 4), "eval_data": of_environments("desk", "sums")}
    row = dx.train(config, environment=both, **rows).records[-1]
    for name in both:
        assert (
            (row[f"environment/{name}/num_turns"] > 1) == (row[f"eval/{name}/num_turns/mean@4"] > 1) == (name == "sums")
        )
        assert {f"environment/{name}/{one}" for one in ("acc", "score", "kept_share", "num_prompts")} <= row.keys()
    rows["data"] = of_environments("sums", "lake")
    with pytest.raises(InputError, match="row 2 must name one of sums, desk of environment.path in its column"):
        dx.train(dataclasses.replace(config, workdir=str(tmp_path / "other")), environment=both, **rows)


def test_generate_gives_reset_the_columns_of_each_prompt():
    class Told:
        def reset(self, hint, answer):
            return hint + answer

        def step(self, text):
            return "", 0.0, True

    with dx.Policy(config_of("unused")) as policy:
        prompts = [[{"role": "user", "content": "1 + 1 ="}]] * 2
        rows = [{"hint": hint, "answer": "7", "environment": "told"} for hint in ("3", "4")]
        found = policy.generate(prompts, n=1, environment={"told": Told, "sums": Sums}, rows=rows)
        said = [policy.tokenizer.decode(tokens) for tokens in found.experience.prompts]
        assert "37" in said[0] and "47" in said[1]
        with pytest.raises(InputError, match="rows has 1 dicts of columns, which must be one for each of 2 prompts"):
            policy.generate(prompts, environment=Told, rows=rows[:1])
        with pytest.raises(InputError, match="go with an environment"):
            policy.generate(prompts, rows=rows)
        with pytest.raises(InputError, match="prompt 1 must name one of told of environment.path .*, not 'sums'"):
            policy.generate(prompts, environment={"told": Told}, rows=[rows[0], {"environment": "sums"}])
