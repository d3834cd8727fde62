"""Whole runs of a mixture of experts."""

import pytest
from preflight.test_programs import ONE_STEP, programs_of, texts_of_a_run
from small_families import changes_of, with_tokenizer
from small_run import resumed, small_config

from dapo_jax.monitor.records import read_metrics
from dapo_jax.training import train


@pytest.fixture
def model(tmp_path):
    return with_tokenizer("qwen3_moe", tmp_path)


def test_a_run_replays_what_the_sampler_chose_and_logs_it(model, tmp_path):
    train(small_config(tmp_path / "run", **changes_of(model)))
    for row in read_metrics(tmp_path / "run")[-2:]:
        assert row["router/max_load"] > 1 > row["router/min_load"] and row["router/aux_loss"] > 0
        assert 0 <= row["router/replay_differs"] < 0.5
    # In the first optimizer step of the run, training would have chosen the same, in float32.
    assert read_metrics(tmp_path / "run")[-2]["rollout_corr/logprob_abs_diff_max"] < 1e-3


@pytest.mark.slow
def test_partial_rollouts_resume_with_their_records(model, tmp_path, monkeypatch):
    """A run that is killed while responses are begun ends as one that is not, with a teacher that judges them."""
    changes = changes_of(
        model,
        **{
            "rollout.segment_length": 2,
            "algorithm.filter_groups.enable": True,
            "algorithm.filter_groups.leftover": "carry",
            "algorithm.filter_groups.leftover_max_staleness": 3,
            "trainer.total_training_steps": 4,
            "trainer.save_freq": 1,
            "actor.optim.lr": 1e-2,
            "algorithm.distillation.path": model,  # whose experts the sampler does not choose
            "algorithm.distillation.form": "top_k",
            "algorithm.distillation.top_k": 6,
        },
    )
    resumed(tmp_path, monkeypatch, changes, killed_in=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "chosen",
    [{}, {"rollout.engine": "slots", "model.lora.rank": 2, "model.lora.target_modules": ("q_proj", "o_proj")}],
    ids=["waves", "slots and adapters"],
)
def test_the_preflight_compiles_what_a_run_of_experts_calls(chosen, model, tmp_path):
    """On eight devices, with a reference, and with the log-probabilities of the training pass."""
    changes = {"actor.old_logprob": "recompute", "actor.use_kl_loss": True, **chosen}
    config = small_config(tmp_path / "run", **changes_of(model, **(ONE_STEP | changes)))
    texts = {program.lower().as_text() for program in programs_of(config).programs}
    missing = [stage for stage, text in texts_of_a_run(config) if text not in texts]
    assert not missing
    row = read_metrics(tmp_path / "run")[-1]
    assert row["rollout_corr/logprob_abs_diff_max"] < 1e-3 and row["router/replay_differs"] < 0.1
