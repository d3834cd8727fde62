"""Tokens that an environment writes are part of a response, but nothing is trained on them."""

import dataclasses

import numpy as np
import pytest
from small_run import small_config

from dapo_jax.learner import learner as learner_module
from dapo_jax.monitor.records import read_metrics
from dapo_jax.rollout.responses import Responses
from dapo_jax.training.loop import train

pytestmark = pytest.mark.slow
ONE_STEP = {"trainer.total_training_steps": 1, "trainer.val_before_train": False, "trainer.test_freq": -1}


def trained_batch(directory, monkeypatch):
    """The batch that the policy of a run of one step is updated with, and the metrics of the step."""
    batches, update = [], learner_module.update_policy
    with monkeypatch.context() as patch:
        patch.setattr(learner_module, "update_policy", lambda *args: (batches.append(args[2]), update(*args))[1])
        train(small_config(directory, **ONE_STEP))
    return batches[0], read_metrics(directory)[-1]


def test_the_loss_leaves_out_what_an_environment_wrote(tmp_path, monkeypatch):
    plain, metrics = trained_batch(tmp_path / "plain", monkeypatch)
    np.testing.assert_array_equal(plain.loss_mask, plain.mask)
    plain_rollout = Responses.rollout

    def with_environment(*args):
        rollout = plain_rollout(*args)
        return dataclasses.replace(rollout, by_policy=np.broadcast_to(np.arange(4) != 1, rollout.mask.shape))

    monkeypatch.setattr(Responses, "rollout", with_environment)
    mixed, mixed_metrics = trained_batch(tmp_path / "mixed", monkeypatch)
    np.testing.assert_array_equal(mixed.mask, plain.mask)
    np.testing.assert_array_equal(mixed.loss_mask, plain.mask & (np.arange(plain.mask.shape[1]) != 1))
    np.testing.assert_array_equal(mixed.advantages, np.where(mixed.loss_mask, plain.advantages, 0))
    assert mixed_metrics["rollout/seq_reward/mean"] == metrics["rollout/seq_reward/mean"]
    assert mixed_metrics["dynamic_sampling/trained_tokens"] == mixed.loss_mask.sum() < plain.loss_mask.sum()
    assert mixed_metrics["actor/grad_norm"] != metrics["actor/grad_norm"]
