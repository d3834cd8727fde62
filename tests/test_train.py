"""Whole runs of a random two-layer model: resuming, records, filtering, refusals."""

import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from small_run import Killed, assert_same_policy, at_call, kill, resumed, rows_without_clock, small_config

from dapo_jax import step as step_module
from dapo_jax import training as train_module
from dapo_jax.monitor.records import read_metrics
from dapo_jax.rollout import learnt_sizes
from dapo_jax.training import train


@pytest.mark.slow
def test_epochs_are_steps_whose_number_is_known_before_the_first(tmp_path, monkeypatch):
    cosine = {"data.arithmetic.num_train": 12, "actor.optim.lr_scheduler_type": "cosine", "trainer.save_freq": 1}
    epochs = small_config(
        tmp_path / "epochs", **cosine, **{"trainer.total_epochs": 1, "trainer.total_training_steps": -1}
    )
    with monkeypatch.context() as patch:
        at_call(patch, step_module, "sample_groups", 2, kill)
        with pytest.raises(Killed):
            train(epochs)
    models = train(epochs)
    steps = small_config(tmp_path / "steps", **cosine, **{"trainer.total_training_steps": 3})
    assert_same_policy(models, jax.device_get(train(steps).actor.params))
    assert rows_without_clock(tmp_path / "epochs") == rows_without_clock(tmp_path / "steps")


@pytest.mark.parametrize(
    ("module", "name", "number"),
    [
        (step_module, "update", 3),
        pytest.param(step_module, "sample_groups", 4, marks=pytest.mark.slow),
        pytest.param(train_module, "record", 5, marks=pytest.mark.slow),
        pytest.param(train_module, "is_due", 8, marks=pytest.mark.slow),
    ],
)
def test_resume_equals_not_stopping(whole, tmp_path, monkeypatch, module, name, number):
    folder, params, rows = whole
    with monkeypatch.context() as patch:
        at_call(patch, module, name, number, kill)
        with pytest.raises(Killed):
            train(small_config(tmp_path))
    models = train(small_config(tmp_path))
    assert_same_policy(models, params)
    assert rows_without_clock(tmp_path) == rows
    work, expected = sampling_work(tmp_path), sampling_work(folder)
    assert work == expected and all(0 < share <= 1 for row in work[1:] for share in row)


def sampling_work(folder):
    """The engine's counters in each row, which do not depend on the clock."""
    names = ("perf/prefill_efficiency", "perf/decode_efficiency")
    return [[row[name] for name in names if name in row] for row in read_metrics(folder)]


def test_a_finished_run_started_again_changes_nothing(whole):
    folder, params, rows = whole
    models = train(small_config(folder))
    assert_same_policy(models, params)
    assert rows_without_clock(folder) == rows


@pytest.mark.slow
def test_the_round_size_changes_speed_but_not_the_batches(whole, tmp_path):
    _, params, rows = whole
    models = train(small_config(tmp_path, **{"data.gen_batch_size": 3}))
    assert_same_policy(models, params, 1e-5)
    for name in ("data/prompts_consumed", "dynamic_sampling/trained_tokens"):
        assert [row.get(name) for row in rows_without_clock(tmp_path)] == [row.get(name) for row in rows]


def test_records_and_log_tell_the_same(whole):
    folder, _, rows = whole
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    log = (Path(folder) / "train.log").read_text()
    kept = [int(count) for count in re.findall(r"Kept \(std>0\): (\d+) prompts", log)]
    assert sum(kept) == sum(row["train/num_kept_prompts"] for row in rows[1:])
    assert len(kept) == sum(row["train/num_gen_batches"] for row in rows[1:])
    for row in rows[1:]:
        assert row["critic/score/max"] == 1.0 and row["critic/score/min"] == 0.0, "only mixed groups are trained on"
        assert row["dynamic_sampling/target_prompt_num"] == 4
        dropped = sum(row[f"dynamic_sampling/filtered_{kind}"] for kind in ("all_correct", "all_wrong", "other"))
        assert dropped == row["dynamic_sampling/num_evaluated_prompts"] - row["train/num_kept_prompts"]
        assert row["rollout_corr/logprob_abs_diff"] < 1e-4 and row["actor/num_updates"] == 2
    assert [row["step"] for row in rows if "eval/arithmetic/acc/mean@4" in row] == [0, 2, 4]
    assert json.loads((Path(folder) / "config.json").read_text())["data"]["train_batch_size"] == 4
    assert sorted(path.name for path in (Path(folder) / "samples").iterdir()) == [
        f"step_{step:06d}.jsonl" for step in range(5)
    ]


@pytest.mark.slow
def test_recomputed_logprobs_give_the_same_run_in_float32(whole, tmp_path):
    _, params, _ = whole
    models = train(small_config(tmp_path, **{"actor.old_logprob": "recompute"}))
    assert_same_policy(models, params, 1e-4)
    for row in rows_without_clock(tmp_path)[1:]:
        assert row["actor/recomputed_logprobs"] == 1
        assert row["rollout_corr/log_ppl_abs_diff"] < 1e-4 and row["rollout_corr/k3_kl"] < 1e-6


@pytest.mark.slow
def test_the_limit_names_counts_and_ways_out(tmp_path):
    hopeless = {"data.arithmetic.low": 400, "data.arithmetic.high": 440}
    config = small_config(tmp_path, **hopeless, **{"algorithm.filter_groups.max_num_gen_batches": 2})
    with pytest.raises(RuntimeError, match="of 16 groups 0 were all right, 16 all wrong.*Three ways out"):
        train(config)


def test_a_failing_reward_function_is_counted_and_never_stops_the_run(tmp_path, monkeypatch):
    (tmp_path / "my_reward.py").write_text(
        "def score(data_source, solution, ground_truth, extra_info):\n"
        "    if len(solution) % 2:\n"
        "        raise RuntimeError('odd')\n"
        "    return {'score': float('1' in solution), 'ones': solution.count('1')}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    changes = {
        "reward.function": "my_reward.score",
        "trainer.total_training_steps": 1,
        "rollout.n": 16,
        "algorithm.filter_groups.metric": "ones",
        "reward.error_score": -2.0,
    }
    train(small_config(tmp_path / "run", **changes))
    row = read_metrics(tmp_path / "run")[-1]
    assert row["reward/num_errors"] > 0 and row["rollout/score/min"] < 0


@pytest.mark.slow
def test_ground_truths_of_any_kind_reach_the_reward_function_and_the_samples(tmp_path):
    truths = [{"a": [1], "b": None}, ["1"], None, True, "7"]
    (tmp_path / "rows.jsonl").write_text(
        "".join(
            json.dumps(
                {
                    "prompt": f"{i} =",
                    "data_source": "own",
                    "reward_model": {"ground_truth": truth},
                    "extra_info": {"kind": type(truth).__name__},
                }
            )
            + "\n"
            for i, truth in enumerate(truths)
        )
    )
    (tmp_path / "own.py").write_text(
        "def score(data_source, solution, ground_truth, extra_info):\n"
        "    return {'score': len(solution) % 2, 'acc': float(type(ground_truth).__name__ == extra_info['kind'])}\n"
    )
    file = (str(tmp_path / "rows.jsonl"),)
    changes = {
        "data.task": "files",
        "data.train_files": file,
        "data.val_files": file,
        "trainer.total_training_steps": 1,
        "reward.function": f"{tmp_path}/own.py:score",
        "algorithm.filter_groups.metric": "score",
        "data.gen_batch_size": 5,
    }
    train(small_config(tmp_path / "run", **changes))
    assert read_metrics(tmp_path / "run")[-1]["rollout/acc/min"] == 1
    samples = [json.loads(line) for line in (tmp_path / "run/samples/step_000001.jsonl").read_text().splitlines()]
    texts = {truth if isinstance(truth, str) else json.dumps(truth) for truth in truths}
    assert samples and {sample["ground_truth"] for sample in samples} <= texts


@pytest.mark.slow
def test_a_reward_function_that_pays_for_length_is_an_alarm_in_the_first_round(tmp_path, monkeypatch):
    (tmp_path / "my_short_reward.py").write_text(
        "def score(data_source, solution, ground_truth, extra_info):\n"
        "    return float(solution == ground_truth) - 0.01 * len(solution)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    changes = {"trainer.total_training_steps": 1, "data.max_response_length": 16, "trainer.test_freq": -1}
    rows = {}
    for name in ("my_short_reward.score", "arithmetic"):
        train(small_config(tmp_path / name, **changes, **{"reward.function": name}))
        rows[name] = read_metrics(tmp_path / name)[-1]
    paid, honest = rows.values()
    assert paid["alarm/score_by_length"] == 1 and paid["reward/length_correlation"] < -0.8
    assert paid["train/filter_rate"] == 0  # each group passes for its lengths
    assert honest["alarm/score_by_length"] == honest["reward/length_correlation"] == 0


def test_resuming_needs_permission_and_another_config_is_named(whole, caplog):
    folder, _, _ = whole
    with pytest.raises(ValueError, match="resume_mode=disable"):
        train(small_config(folder, **{"trainer.resume_mode": "disable"}))


@pytest.mark.slow
def test_the_overlong_penalty_reaches_the_reward(tmp_path):
    changes = {
        "reward.overlong_buffer.enable": True,
        "reward.overlong_buffer.len": 4,
        "trainer.total_training_steps": 1,
    }
    train(small_config(tmp_path, **changes))
    row = read_metrics(tmp_path)[-1]
    assert row["rollout/overlong_reward/mean"] < 0 < row["rollout/overlong/mean"] <= 1
    np.testing.assert_allclose(
        row["rollout/seq_reward/mean"], row["rollout/score/mean"] + row["rollout/overlong_reward/mean"], atol=1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["grpo", "gae"])
def test_a_batch_without_a_token_to_train_on_changes_nothing(tmp_path, estimator):
    """All answers are cut off, and left out of the loss for that."""
    changes = {
        "algorithm.filter_groups.enable": False,
        "algorithm.overlong_filtering": True,
        "data.gen_batch_size": 4,
        "data.max_response_length": 2,
        "rollout.min_response_length": 2,
        "algorithm.adv_estimator": estimator,
        "trainer.total_training_steps": 1,
    }
    models = train(small_config(tmp_path, **changes))
    for state in (models.actor, models.critic):
        assert state is None or (int(state.updates) == 0 and not np.any(jax.tree.leaves(state.moments)[1]))
    for row in read_metrics(tmp_path)[1:]:
        assert row["actor/overlong_filtered"] == 1 and row["actor/num_updates"] == row["actor/skipped_updates"] == 0
        assert "actor/entropy" not in row and row["alarm/entropy_collapse"] == 0


@pytest.mark.slow
def test_a_mesh_of_eight_trains_like_any(tmp_path):
    changes = {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2, "trainer.total_training_steps": 1}
    models = train(small_config(tmp_path, **changes))
    query = models.actor.params["layers"]["query"]
    assert query.addressable_shards[0].data.size * 4 == query.size


@pytest.mark.slow
def test_without_the_filter_one_round_is_trained_on_as_it_is(tmp_path):
    changes = {
        "algorithm.filter_groups.enable": False,
        "data.gen_batch_size": 4,
        "trainer.total_training_steps": 2,
    }
    with pytest.raises(ValueError, match="backfill='stream' is not read without algorithm.filter_groups.enable=True"):
        train(small_config(tmp_path, **changes, **{"algorithm.filter_groups.backfill": "stream"}))
    train(small_config(tmp_path, **changes))
    rows = read_metrics(tmp_path)[1:]
    assert [row["data/prompts_consumed"] for row in rows] == [4, 8]
    assert all(row["train/filter_rate"] == 0 and row["train/num_gen_batches"] == 1 for row in rows)
    assert [row["rollout/finished_task_count"] for row in rows] == [4, 4]
    assert "Filter groups enabled" not in (tmp_path / "train.log").read_text()


@pytest.mark.slow
def test_bfloat16_trains_and_its_mismatch_is_small(tmp_path):
    train(small_config(tmp_path, **{"model.dtype": "bfloat16", "trainer.total_training_steps": 2}))
    for row in read_metrics(tmp_path)[1:]:
        assert np.isfinite(row["actor/pg_loss"]) and row["actor/skipped_updates"] == 0
        assert 0 < row["rollout_corr/logprob_abs_diff"] and row["rollout_corr/k3_kl"] < 1e-4


@pytest.mark.slow
def test_a_run_of_one_shape_compiles_nothing_after_its_first_steps(tmp_path, monkeypatch, traced_policies):
    """Responses of one chunk: keep rates and samples change from step to step, shapes do not."""
    traced_policies.clear()
    jax.clear_caches()
    compiled, after_step = [], []
    recorded = train_module.record
    monkeypatch.setattr(train_module, "record", lambda *given: (recorded(*given), after_step.append(len(compiled))))

    def listen(event, _seconds, **_):
        if "backend_compile" in event or "cache_retrieval" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        train(small_config(tmp_path, **{"trainer.total_training_steps": 8, "trainer.save_freq": -1}))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert after_step[1] > 0 and after_step[-1] == after_step[2], after_step  # after evaluation 0 and steps 1 and 2


@pytest.mark.slow
def test_adapters_and_token_budgets_resume_too(tmp_path, monkeypatch):
    changes = {
        "model.lora.rank": 2,
        "actor.use_dynamic_bsz": True,
        "actor.ppo_max_token_len_per_device": 40,
        "actor.use_kl_loss": True,
        "actor.optim.moments_dtype": "bfloat16",
        "trainer.total_training_steps": 3,
        "trainer.save_freq": 1,
        "actor.optim.lr": 1e-2,
    }
    models = resumed(tmp_path, monkeypatch, changes)
    assert all("_lora_" in name for name in models.actor.params["layers"])
    assert read_metrics(tmp_path / "a")[-1]["actor/kl_loss"] > 0
    for change in ({"model.lora.rank": 4}, {"model.lora.target_modules": ("q_proj",)}):
        with pytest.raises(ValueError, match=r"step 3 is of another model: .* arrays differ, actor\.\w+.*_lora_"):
            train(small_config(tmp_path / "a", **changes | change | {"trainer.total_training_steps": 4}))


@pytest.mark.slow
def test_slots_resume_with_what_they_have_learnt_of_lengths(tmp_path, monkeypatch):
    monkeypatch.setattr(learnt_sizes, "free_bytes", lambda mesh: 1e5)  # the lengths decide between 5 and 6 slots
    changes = {
        "rollout.engine": "slots",
        "rollout.max_num_seqs": 0,
        "data.max_response_length": 24,
        "rollout.decode_chunk_length": 4,
        "trainer.total_training_steps": 3,
        "trainer.save_freq": 1,
        "actor.optim.lr": 1e-2,
    }
    resumed(tmp_path, monkeypatch, changes)
    assert sampling_work(tmp_path / "a") == sampling_work(tmp_path / "b")
