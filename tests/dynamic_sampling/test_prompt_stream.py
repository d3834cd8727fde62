"""The policies of dynamic sampling in whole runs of a random two-layer model."""

import jax
import numpy as np
import pytest
from crash_test import OF_A_RUN
from small_run import assert_same_policy, rows_without_clock, small_config

from dapo_jax.monitor.filter_log import rule_words
from dapo_jax.monitor.records import read_metrics
from dapo_jax.training import loop as train_module
from dapo_jax.training.loop import train

FILTER = "algorithm.filter_groups"
BATCHES = ("data/prompts_consumed", "dynamic_sampling/trained_tokens", "critic/score/mean", "actor/pg_loss")


def test_the_log_speaks_of_the_rule_that_the_config_has(tmp_path):
    changes = {f"{FILTER}.rule": "mean_range", f"{FILTER}.filter_low": 0.2}
    assert rule_words(small_config(tmp_path, **changes).algorithm.filter_groups).kept == "0.2<mean<0.99"
    assert rule_words(small_config(tmp_path).algorithm.filter_groups).dropped == "std=0"


STREAM = {f"{FILTER}.backfill": "stream"}
SCHEDULES = {
    "queue": {**STREAM, "rollout.max_num_seqs": 24, f"{FILTER}.stream.slack": 3.0},
    "small blocks": {**STREAM, "rollout.max_num_seqs": 48, "data.gen_batch_size": 5},
    "large rounds": {"data.gen_batch_size": 17, "rollout.max_num_seqs": 64},
    "stream, little slack": {**STREAM, f"{FILTER}.stream.slack": 0.75},
    "stream": STREAM,
    "stream, much slack": {**STREAM, f"{FILTER}.stream.slack": 2.5},
    "small rounds": {"data.gen_batch_size": 3},
    "narrow": {**STREAM, "rollout.max_num_seqs": 16},
}


@pytest.mark.slow
@pytest.mark.long("queue", "large rounds")
@pytest.mark.parametrize("name", SCHEDULES)
def test_with_requeue_every_schedule_trains_on_the_same_batches(whole, tmp_path, name):
    _, params, rows = whole
    models = train(small_config(tmp_path, **SCHEDULES[name]))
    assert_same_policy(models, params, 1e-5)
    found = rows_without_clock(tmp_path)
    for metric in BATCHES:
        np.testing.assert_allclose(
            [row.get(metric, 0) for row in found], [row.get(metric, 0) for row in rows], rtol=1e-4, atol=1e-6
        )
    if "data.gen_batch_size" not in SCHEDULES[name]:
        assert [row.get("train/num_gen_batches") for row in found] == [row.get("train/num_gen_batches") for row in rows]
    if name == "queue":  # what is given up is counted
        for row in read_metrics(tmp_path)[1:]:
            assert row["dynamic_sampling/num_aborted"] > 0
            assert row["dynamic_sampling/generated_tokens"] >= row["dynamic_sampling/trained_tokens"]
            assert 0 < row["perf/decode_efficiency"] < 1


def test_carried_groups_survive_a_restart(tmp_path, monkeypatch):
    progress = []
    monkeypatch.setattr(
        train_module, "summary", lambda workdir, trainer, tasks, last, *rest: progress.append(last) or []
    )
    carry = {f"{FILTER}.leftover": "carry", "data.gen_batch_size": 16}
    carry |= {"trainer.total_training_steps": 3, "trainer.val_before_train": False}
    whole = train(small_config(tmp_path / "whole", **carry))
    train(small_config(tmp_path / "parts", **carry | {"trainer.total_training_steps": 2}))
    resumed = train(small_config(tmp_path / "parts", **carry))
    assert_same_policy(resumed, jax.device_get(whole.actor.params))
    rows, parts = ([row for row in rows_without_clock(tmp_path / name) if row["step"]] for name in ("whole", "parts"))
    assert len(rows) == 3 and parts[2:] == rows[2:]
    carried = [row["dynamic_sampling/num_carried_in"] for row in rows]
    assert carried[0] == 0 and max(carried) > 0
    evaluated = sum(row["dynamic_sampling/num_evaluated_prompts"] for row in rows)
    assert evaluated <= 3 * 16 and progress[0].groups_kept + progress[0].groups_dropped == evaluated
    first, last = (
        {name: vars(one)[name] for name in vars(one).keys() - OF_A_RUN} for one in (progress[0], progress[-1])
    )
    assert first == last


@pytest.mark.slow
def test_a_step_without_groups_updates_nothing(tmp_path):
    hopeless = {
        "data.arithmetic.low": 400,
        "data.arithmetic.high": 440,
        f"{FILTER}.max_num_gen_batches": 1,
        f"{FILTER}.on_limit": "partial",
        "trainer.total_training_steps": 2,
    }
    models = train(small_config(tmp_path / "skip", **hopeless, **{f"{FILTER}.on_empty": "skip_step"}))
    assert int(models.actor.updates) == 0
    rows = read_metrics(tmp_path / "skip")
    assert [row["step"] for row in rows] == [0, 1, 2] and rows[2]["data/prompts_consumed"] == 16
    assert rows[2]["dynamic_sampling/partial_step"] == 1 and "actor/pg_loss" not in rows[2]
    assert rows[2]["rollout/acc/max"] == 0 and rows[2]["reward/unfiltered_mean"] <= 0
    assert rows[2]["dynamic_sampling/uniform_share"] == rows[2]["train/filter_rate"] == 1
    assert rows[2]["reward/num_errors"] == rows[2]["reward/error_share"] == rows[2]["alarm/reward_errors"] == 0
    assert rows[2]["rollout/finished_task_count"] == 8 and rows[2]["experience_pipeline/experience_count"] == 0
    models = train(small_config(tmp_path / "train", **hopeless, **{f"{FILTER}.on_empty": "train_unfiltered"}))
    assert int(models.actor.updates) == 4
    assert read_metrics(tmp_path / "train")[-1]["actor/pg_loss"] == 0


@pytest.mark.slow
def test_a_partial_step_is_normalised_by_its_own_tokens(tmp_path):
    """The same groups in a run whose batch size they fill give the same update."""
    limit = {
        f"{FILTER}.max_num_gen_batches": 1,
        f"{FILTER}.on_limit": "partial",
        "trainer.total_training_steps": 1,
        "actor.ppo_mini_batch_size": 1,
        "actor.ppo_micro_batch_size_per_device": 2,
    }
    short = train(small_config(tmp_path / "short", **limit, **{"data.train_batch_size": 8, "data.gen_batch_size": 8}))
    row = read_metrics(tmp_path / "short")[-1]
    kept = int(row["train/num_kept_prompts"])
    assert 0 < kept < 8 and row["actor/num_updates"] == kept
    full = train(small_config(tmp_path / "full", **limit, **{"data.train_batch_size": kept, "data.gen_batch_size": 8}))
    assert_same_policy(short, jax.device_get(full.actor.params), 1e-6)


@pytest.mark.slow
def test_the_lines_of_dynamic_sampling_are_on_the_console_if_asked(tmp_path, capsys):
    one_round = {f"{FILTER}.on_limit": "partial", f"{FILTER}.max_num_gen_batches": 1, "trainer.total_training_steps": 1}
    train(small_config(tmp_path, **one_round, **{"monitor.filter_log": True}))
    lines = (tmp_path / "train.log").read_text().splitlines()
    written = [line.split("] ", 1)[1] for line in lines]
    [row] = [row for row in read_metrics(tmp_path) if row["step"]]
    last = written.index("INFO: Starting training iteration...")
    block = written[written.index("INFO: Starting rollout generation...") : last + 1]
    assert block[1].startswith("INFO: Generated batch 1, 8 prompts, ")
    rate = row["train/filter_rate"]
    assert block[-3:-1] == ["INFO: train/num_gen_batches: 1", f"INFO: train/filter_rate: {rate:.3f}"]
    printed = capsys.readouterr()
    shown = [line for line in printed.err.splitlines() if line.startswith("INFO: ")]
    assert shown == block and "step 1/1" in printed.out
