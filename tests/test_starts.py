"""Checks of a start before the first step, and steps whose verdicts all fail."""

import json

import pytest
from small_run import own_function, small_config, sums

from dapo_jax.data.experience import check_score_names
from dapo_jax.evaluate.evaluate import bench
from dapo_jax.monitor.records import read_metrics
from dapo_jax.training.loop import train


def rows_file(tmp_path, name, numbers):
    (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in sums(*numbers)))
    return str(tmp_path / name)


def reached(config, monkeypatch):
    """Runs the checks of a start, up to the first step."""
    monkeypatch.setattr("dapo_jax.training.loop.first_state", lambda run: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(config)


def test_a_function_that_cannot_work_is_refused_before_the_first_step(tmp_path, monkeypatch):
    monkeypatch.setattr("dapo_jax.run.parts.build_engine", None)  # nothing is built to sample with
    for body, metric, message in (
        ("return None", "acc", "failed on all 8 .*returned None: no verdict"),
        ("return {'score': 1.0, 'acc': 1.0}", "right", "'right' is not among the numbers .*own.py:score' .*score, acc"),
    ):
        changes = {"reward.function": own_function(tmp_path, body), "algorithm.filter_groups.metric": metric}
        with pytest.raises(ValueError, match=message):
            train(small_config(tmp_path / "run", **changes))
    for name, message in (("seq_reward", ", which is computed"), ("a/b", ": / separates the parts")):
        with pytest.raises(ValueError, match=f"returns '{name}'{message}"):
            check_score_names({"score": 1.0, name: 1.0})


def test_the_function_of_a_task_set_is_tried_too(tmp_path):
    tasks = {"named": {"files": rows_file(tmp_path, "a.jsonl", [1]), "reward_function": own_function(tmp_path, "pass")}}
    with pytest.raises(ValueError, match="failed on all 8 .*a.jsonl row 1, .*returned None"):
        train(small_config(tmp_path / "run", **{"evaluate.tasks": json.dumps(tasks)}))


def test_a_function_is_tried_once_for_a_data_source(tmp_path, monkeypatch):
    calls = tmp_path / "calls"
    body = f"open({str(calls)!r}, 'a').write(data_source + '\\n')\n    return float(ground_truth in solution)"
    reached(small_config(tmp_path / "run", **{"reward.function": own_function(tmp_path, body)}), monkeypatch)
    assert calls.read_text().split() == ["arithmetic"] * 8  # not again for the held-out problems


WORKS_AT_FIRST = (
    "calls.append(1)\n    if len(calls) > 8 + {more}: raise RuntimeError('the server is away')\n    return 1.0"
)


@pytest.mark.short("0-True", "16-False")
@pytest.mark.parametrize("filtered", [True, False])
@pytest.mark.parametrize("more", [0, 16])
def test_a_step_in_which_every_verdict_failed_stops_the_run(more, filtered, tmp_path, capfd):
    """An evaluation does not: the policy may still learn to give answers that can be read."""
    changes = {
        "reward.function": own_function(tmp_path, WORKS_AT_FIRST.format(more=more)),
        "evaluate.n": 4,
        "algorithm.filter_groups.enable": filtered,
    }
    if not filtered:
        changes["data.gen_batch_size"] = None
    with pytest.raises(RuntimeError, match="step 1: .* failed on all .* most often with RuntimeError: the server is"):
        train(small_config(tmp_path / "run", **changes))
    shown = capfd.readouterr().err
    assert ("evaluation of the held-out problems: " in shown) == (more == 0)
    assert "INFO: " not in shown, "monitor.filter_log is off"
    assert not [row for row in read_metrics(tmp_path / "run") if row["step"]]


@pytest.mark.slow
def test_an_evaluation_of_its_own_needs_verdicts(tmp_path):
    function = own_function(tmp_path, WORKS_AT_FIRST.format(more=0))
    config = small_config(tmp_path / "run", **{"reward.function": function})
    with pytest.raises(RuntimeError, match="evaluation of the held-out problems: .* failed on all"):
        bench(config, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_too_few_rows_and_held_out_prompts_that_are_trained_on_are_warned_of(tmp_path, monkeypatch, capfd):
    reached(small_config(tmp_path / "usual"), monkeypatch)
    warned = capfd.readouterr().err
    assert "also trained on" not in warned and "prompts repeat" not in warned
    shared = rows_file(tmp_path, "shared.jsonl", [2, 7, 8])
    changes = {
        "data.task": "files",
        "data.train_files": (rows_file(tmp_path, "train.jsonl", range(3)),),
        "data.val_files": (shared,),
        "evaluate.tasks": json.dumps({"easy": {"files": shared, "max_prompts": 1}}),
    }
    reached(small_config(tmp_path / "run", **changes), monkeypatch)
    warned = capfd.readouterr().err
    assert "3 problems to train on, fewer than data.gen_batch_size=8: prompts repeat within a batch" in warned
    assert "1 of 3 prompts of data.val_files are also trained on" in warned
    assert "1 of 1 prompts of evaluate.tasks, 'easy' are also trained on" in warned
