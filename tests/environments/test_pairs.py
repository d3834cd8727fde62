"""Episodes with what else a run may have: they train, on the policy's tokens alone, and resume to the bit."""

import functools

import numpy as np
import pytest
from environments.test_episodes import config_of, several
from small_families import changes_of, with_tokenizer
from small_run import resumed

from dapo_jax.monitor.records import read_metrics
from dapo_jax.training.loop import train

FILTER = "algorithm.filter_groups"
FIRST = {"first": "now: "}
ONE_STEP = {
    "data.max_response_length": 40,
    "rollout.n": 8,
    "trainer.total_training_steps": 1,
    "trainer.test_freq": -1,
    "trainer.val_before_train": False,
    "trainer.save_freq": -1,
}
SAMPLED = "rollout/num_turns/mean", "rollout/score/mean", "environment/calls", "dynamic_sampling/trained_tokens"
ALIKE = {  # settings that change the first update by rounding alone
    "a mesh": {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2},
    "rows": {"actor.use_dynamic_bsz": False, "actor.ppo_micro_batch_size_per_device": 2},
    "other old log-probabilities": {"actor.old_logprob": "recompute"},
    "other workers": {"environment.num_workers": 3},
}
OTHER = {
    "adapters": {"model.lora.rank": 2},
    "a teacher": {"algorithm.distillation.path": "random", "algorithm.distillation.form": "top_k"},
    "a critic": {"algorithm.adv_estimator": "gae"},
    "overlong": {"reward.overlong_buffer.enable": True, "reward.overlong_buffer.len": 10},
    "a reference": {"algorithm.use_kl_in_reward": True},
    "evaluation": {"trainer.test_freq": 1, "trainer.val_before_train": True},
}


def first_step(folder, **changes):
    train(config_of(folder, arguments=FIRST, **{**ONE_STEP, **changes}))
    return read_metrics(folder)[-1]


@functools.cache
def alone(folder):
    return first_step(folder)


def assert_trained(row):
    """The training pass has read the prompts, and what the environment said, as the sampler has."""
    assert row["rollout/num_turns/max"] > 1 and row["dynamic_sampling/trained_tokens"] > 0
    assert row["actor/skipped_updates"] == 0 and np.isfinite(row["actor/grad_norm"])
    assert row["rollout_corr/logprob_abs_diff_max"] < 1e-3


@pytest.mark.slow
@pytest.mark.long("adapters")
@pytest.mark.parametrize("name", [*ALIKE, *OTHER])
def test_the_first_step_is_that_of_a_run_without(name, tmp_path, tmp_path_factory):
    expected = alone(tmp_path_factory.getbasetemp() / "alone")
    row = first_step(tmp_path, **(ALIKE | OTHER)[name])
    assert_trained(row)
    assert [row[one] for one in SAMPLED] == pytest.approx([expected[one] for one in SAMPLED])
    if name in ALIKE:
        for one in ("actor/pg_loss", "actor/entropy", "actor/grad_norm"):
            assert row[one] == pytest.approx(expected[one], abs=1e-5), one


@pytest.mark.slow
@pytest.mark.long("glm4_moe")
@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe"])
def test_the_experts_of_all_tokens_are_replayed(name, tmp_path):
    row = first_step(tmp_path / "run", **changes_of(with_tokenizer(name, tmp_path)))
    assert_trained(row)
    assert row["router/replay_differs"] < 0.05


SEGMENTS = {
    "rollout.segment_length": 12,
    f"{FILTER}.enable": True,
    f"{FILTER}.leftover": "carry",
    f"{FILTER}.leftover_max_staleness": 5,
    "trainer.total_training_steps": 6,
}
STATE = {
    "carried": {f"{FILTER}.leftover": "carry", f"{FILTER}.leftover_max_staleness": 3},
    "ahead": {"trainer.rollout_ahead": 1, "trainer.rollout_devices": 4},
    "segments": SEGMENTS,
    "several": SEGMENTS,  # environments
}


@pytest.mark.slow
@pytest.mark.long("carried")
@pytest.mark.parametrize("name", STATE)
def test_what_was_sampled_before_a_kill_keeps_its_prompts(name, tmp_path, monkeypatch):
    """Prompts that an environment has added to, and with segments episodes under way, of a model with experts."""
    steps = {"trainer.total_training_steps": 4, "trainer.save_freq": 1}
    played = config_of("unused", arguments={**FIRST, "most_s": 0.01}).environment
    options = {f"environment.{one}": getattr(played, one) for one in ("path", "arguments", "turn_template")}
    changes = {**options, **ONE_STEP, **steps, **STATE[name]}
    if name == "segments":
        changes = changes_of(with_tokenizer("qwen3_moe", tmp_path), **changes)
    if name == "several":
        changes |= several(tmp_path, FIRST)
    resumed(tmp_path, monkeypatch, changes, killed_in=2 if STATE[name] is SEGMENTS else 3)
    rows = [row for row in read_metrics(tmp_path / "b") if "rollout/num_turns/max" in row]
    assert len(rows) >= 2 and rows[0]["rollout_corr/logprob_abs_diff_max"] < 1e-3
    if name == "several":
        names = [f"environment/{of}/num_turns" for of in ("one", "three")]  # one of them may sample nothing in a step
        one, three = ([row[of] for row in rows if of in row] for of in names)
        assert set(one) == {1.0} and min(three) > 1
