"""Whole runs of a random two-layer model: resuming, records, rewards, options that change a run's course."""

import itertools
import json
import re

import jax
import numpy as np
import pytest
from small_run import (
    Killed,
    assert_as_undisturbed,
    assert_same_policy,
    at_call,
    copied,
    kill,
    own_function,
    resumed,
    rows_without_clock,
    sampling_work,
    small_config,
)

from dapo_jax.learner import update as update_module
from dapo_jax.monitor.records import RunRecords, read_metrics
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.rollout import lengths
from dapo_jax.run import meshes
from dapo_jax.tools.report.describe import progress, steps_left
from dapo_jax.tools.report.read import read_run
from dapo_jax.training import loop as train_module
from dapo_jax.training import step as step_module
from dapo_jax.training.loop import train

ONE_STEP = {"trainer.total_training_steps": 1, "trainer.test_freq": -1, "trainer.val_before_train": False}


@pytest.fixture
def one_device(monkeypatch):
    """Runs have a mesh of one device: programs that no other run has compile faster."""
    monkeypatch.setattr(meshes, "make_mesh", lambda *_, **__: make_mesh(1, 1, 1, jax.devices()[:1]))


def kill_at(monkeypatch, config, module, name, number=1):
    with monkeypatch.context() as patch:
        at_call(patch, module, name, number, kill)
        with pytest.raises(Killed):
            train(config)


def test_resume_equals_not_stopping(whole, tmp_path, monkeypatch):
    config = small_config(copied(whole[0], tmp_path, step=2))
    kill_at(monkeypatch, config, step_module, "update")
    assert_as_undisturbed(train(config), tmp_path, whole)


@pytest.mark.slow
def test_a_run_that_is_killed_in_each_phase_ends_as_one_that_is_not(whole, tmp_path, monkeypatch):
    config = small_config(tmp_path, **{"trainer.save_freq": 1})
    for module, name, number in (
        (step_module, "sample_groups", 2),  # of step 2, as all the following
        (step_module, "make_batch", 1),
        (step_module, "update", 1),
        (update_module, "_optimizer_step", 2),  # between its optimizer steps
        (train_module, "evaluate", 1),
        (RunRecords, "write_samples", 1),
        (train_module, "record", 1),
        (train_module, "save_state", 1),
        (train_module, "save_state", 2),  # of step 3
    ):
        kill_at(monkeypatch, config, module, name, number)
    assert_as_undisturbed(train(config), tmp_path, whole)


@pytest.mark.slow
def test_epochs_are_steps_whose_number_is_known_before_the_first(tmp_path, monkeypatch):
    cosine = {"data.arithmetic.num_train": 12, "actor.optim.lr_scheduler_type": "cosine", "trainer.save_freq": 1}
    one = {"trainer.total_epochs": 1, "trainer.total_training_steps": -1}
    epochs = small_config(tmp_path / "epochs", **cosine, **one)
    kill_at(monkeypatch, epochs, step_module, "sample_groups", 2)
    assert steps_left(read_run("", epochs.workdir)) == 2
    models = train(epochs)
    assert progress(read_run("", epochs.workdir)) == "Complete: 3 of 3 steps."
    steps = small_config(tmp_path / "steps", **cosine, **{"trainer.total_training_steps": 3})
    assert_same_policy(models, jax.device_get(train(steps).actor.params))
    assert rows_without_clock(tmp_path / "epochs") == rows_without_clock(tmp_path / "steps")


@pytest.mark.slow
def test_slots_adapters_and_token_budgets_resume_too(tmp_path, monkeypatch, one_device):
    """With the memory that was free at first, whatever is free later; and other adapters are refused."""
    free = itertools.chain([1e5, 1e5], itertools.repeat(9e5))  # of the whole run, of the killed one, of its restart
    monkeypatch.setattr(lengths, "free_bytes", lambda mesh: next(free))
    changes = {
        "rollout.max_num_seqs": 0,
        "rollout.decode_chunk_length": 4,
        "data.max_response_length": 24,
        "model.lora.rank": 2,
        "actor.use_dynamic_bsz": True,
        "actor.ppo_max_token_len_per_device": 40,
        "actor.use_kl_loss": True,
        "actor.optim.moments_dtype": "bfloat16",
        "actor.optim.lr": 1e-2,
        "trainer.total_training_steps": 3,
        "trainer.save_freq": 1,
    }
    models = resumed(tmp_path, monkeypatch, changes)
    assert sampling_work(tmp_path / "a") == sampling_work(tmp_path / "b")
    assert all("_lora_" in name for name in models.actor.params["layers"])
    assert read_metrics(tmp_path / "a")[-1]["actor/kl_loss"] > 0
    for change in ({"model.lora.rank": 4}, {"model.lora.target_modules": ("q_proj",)}):
        with pytest.raises(ValueError, match=r"step 3 is of another model: .* arrays differ, actor\.\w+.*_lora_"):
            train(small_config(tmp_path / "a", **changes | change | {"trainer.total_training_steps": 4}))


def test_a_finished_run_started_again_changes_nothing(whole, tmp_path):
    config = small_config(copied(whole[0], tmp_path, step=4))
    assert_as_undisturbed(train(config), tmp_path, whole)


def test_records_and_log_tell_the_same(whole):
    folder, _, rows = whole
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    kept = [int(count) for count in re.findall(r"Kept \(std>0\): (\d+) prompts", (folder / "train.log").read_text())]
    assert sum(kept) == sum(row["train/num_kept_prompts"] for row in rows[1:])
    assert len(kept) == sum(row["train/num_gen_batches"] for row in rows[1:])
    for row in rows[1:]:
        assert row["critic/score/max"] == 1.0 and row["critic/score/min"] == 0.0, "only mixed groups are trained on"
        assert row["dynamic_sampling/target_prompt_num"] == 4
        dropped = sum(row[f"dynamic_sampling/filtered_{kind}"] for kind in ("all_correct", "all_wrong", "other"))
        assert dropped == row["dynamic_sampling/num_evaluated_prompts"] - row["train/num_kept_prompts"]
        assert row["rollout_corr/logprob_abs_diff"] < 1e-4 and row["actor/num_updates"] == 2
        assert row["alarm/truncation"] in (0.0, 1.0)
        assert row["alarm/score_by_length"] == row["reward/length_correlation"] == 0
    assert all(0 < share <= 1 for row in sampling_work(folder)[1:] for share in row)
    assert [row["step"] for row in rows if "eval/arithmetic/acc/mean@4" in row] == [0, 2, 4]
    assert json.loads((folder / "config.json").read_text())["data"]["train_batch_size"] == 4
    names = sorted(path.name for path in (folder / "samples").iterdir())
    assert names == [f"step_{step:06d}.jsonl" for step in range(5)]
    progress = json.loads((folder / "checkpoints" / "4" / "progress" / "metadata").read_text())
    assert progress["alarms"]["truncation"] == rows[-1]["alarm/truncation"], "a restart sees the alarms that are on"
    assert "first entropy" in progress["alarms"] and progress["best"] > 0 and progress["unrecorded"] is None


@pytest.mark.slow
def test_recomputed_logprobs_give_the_same_run_in_float32(whole, tmp_path):
    models = train(small_config(tmp_path, **{"actor.old_logprob": "recompute"}))
    assert_same_policy(models, whole[1], 1e-4)
    for row in rows_without_clock(tmp_path)[1:]:
        assert row["actor/recomputed_logprobs"] == 1
        assert row["rollout_corr/log_ppl_abs_diff"] < 1e-4 and row["rollout_corr/k3_kl"] < 1e-6


@pytest.mark.slow
def test_a_failing_reward_function_is_counted_and_never_stops_the_run(tmp_path):
    body = "if len(solution) % 2: raise RuntimeError('odd')\n"
    body += "    return {'score': float('1' in solution), 'ones': solution.count('1')}"
    changes = {
        "reward.function": own_function(tmp_path, body),
        "rollout.n": 16,
        "algorithm.filter_groups.metric": "ones",
        "reward.error_score": -2.0,
    }
    train(small_config(tmp_path / "run", **ONE_STEP, **changes))
    (row,) = read_metrics(tmp_path / "run")
    assert row["reward/num_errors"] > 0 and row["rollout/score/min"] < 0


@pytest.mark.full
def test_ground_truths_of_any_kind_reach_the_reward_function_and_the_samples(tmp_path):
    truths, lines = [{"a": [1], "b": None}, ["1"], None, True, "7"], []
    for i, truth in enumerate(truths):
        answer = {"reward_model": {"ground_truth": truth}, "extra_info": {"kind": type(truth).__name__}}
        lines.append(json.dumps({"prompt": f"{i} =", "data_source": "own", **answer}) + "\n")
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    body = "kind = type(ground_truth).__name__\n"
    body += "    return {'score': len(solution) % 2, 'acc': float(kind == extra_info['kind'])}"
    file = (str(tmp_path / "rows.jsonl"),)
    changes = {
        "data.task": "files",
        "data.train_files": file,
        "data.val_files": file,
        "reward.function": own_function(tmp_path, body),
        "algorithm.filter_groups.metric": "score",
        "data.gen_batch_size": 5,
    }
    train(small_config(tmp_path / "run", **ONE_STEP, **changes))
    assert read_metrics(tmp_path / "run")[-1]["rollout/acc/min"] == 1
    samples = [json.loads(line) for line in (tmp_path / "run/samples/step_000001.jsonl").read_text().splitlines()]
    texts = {truth if isinstance(truth, str) else json.dumps(truth) for truth in truths}
    assert samples and {sample["ground_truth"] for sample in samples} <= texts


@pytest.mark.full
def test_a_reward_function_that_pays_for_length_is_an_alarm_in_the_first_round(tmp_path):
    body = "return float(solution == ground_truth) - 0.01 * len(solution)"
    changes = {"data.max_response_length": 16, "reward.function": own_function(tmp_path, body)}
    train(small_config(tmp_path / "run", **ONE_STEP, **changes))
    (row,) = read_metrics(tmp_path / "run")
    assert row["alarm/score_by_length"] == 1 and row["reward/length_correlation"] < -0.8
    assert row["train/filter_rate"] == 0  # each group passes for its lengths


@pytest.mark.full
def test_without_the_filter_one_round_is_trained_on_as_it_is_with_the_overlong_penalty(tmp_path):
    changes = {
        "algorithm.filter_groups.enable": False,
        "data.gen_batch_size": 4,
        "reward.overlong_buffer.enable": True,
        "reward.overlong_buffer.len": 4,
        "trainer.total_training_steps": 2,
    }
    train(small_config(tmp_path, **changes))
    rows = read_metrics(tmp_path)[1:]
    assert [row["data/prompts_consumed"] for row in rows] == [4, 8]
    for row in rows:
        assert row["train/filter_rate"] == 0 and row["train/num_gen_batches"] == 1
        assert row["rollout/finished_task_count"] == 4
        assert row["rollout/overlong_reward/mean"] < 0 < row["rollout/overlong/mean"] <= 1
        shaped = row["rollout/score/mean"] + row["rollout/overlong_reward/mean"]
        np.testing.assert_allclose(row["rollout/seq_reward/mean"], shaped, atol=1e-5)
    assert "Filter groups enabled" not in (tmp_path / "train.log").read_text()


@pytest.mark.full
def test_a_batch_without_a_token_to_train_on_changes_neither_policy_nor_critic(tmp_path):
    """All answers are cut off, and left out of the loss for that."""
    changes = {
        "algorithm.filter_groups.enable": False,
        "algorithm.overlong_filtering": True,
        "data.gen_batch_size": 4,
        "data.max_response_length": 2,
        "rollout.min_response_length": 2,
        "algorithm.adv_estimator": "gae",
        "trainer.total_training_steps": 1,
    }
    models = train(small_config(tmp_path, **changes))
    for state in (models.actor, models.critic):
        assert int(state.updates) == 0 and not np.any(jax.tree.leaves(state.moments)[1])
    for row in read_metrics(tmp_path)[1:]:
        assert row["actor/overlong_filtered"] == 1 and row["actor/num_updates"] == row["actor/skipped_updates"] == 0
        assert "actor/entropy" not in row and row["alarm/entropy_collapse"] == 0


@pytest.mark.slow
def test_bfloat16_trains_and_its_mismatch_is_small(tmp_path, one_device):
    train(small_config(tmp_path, **{"model.dtype": "bfloat16", "trainer.total_training_steps": 2}))
    for row in read_metrics(tmp_path)[1:]:
        assert np.isfinite(row["actor/pg_loss"]) and row["actor/skipped_updates"] == 0
        assert 0 < row["rollout_corr/logprob_abs_diff"] and row["rollout_corr/k3_kl"] < 1e-4


@pytest.mark.slow
def test_a_run_of_one_shape_compiles_nothing_after_its_first_steps(tmp_path, monkeypatch):
    """Responses of one chunk: keep rates and samples change from step to step, shapes do not."""
    compiled, after_step = [], []
    recorded = train_module.record
    monkeypatch.setattr(train_module, "record", lambda *given: (recorded(*given), after_step.append(len(compiled))))

    def listen(event, _seconds, **_):
        if "backend_compile" in event or "cache_retrieval" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        # No other run of this process has compiled an update with such a decay.
        changes = {"trainer.total_training_steps": 8, "trainer.save_freq": -1, "actor.optim.weight_decay": 0.02}
        train(small_config(tmp_path, **changes))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert after_step[1] > 0 and after_step[-1] == after_step[2], after_step  # after evaluation 0 and steps 1 and 2
