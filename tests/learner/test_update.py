"""Which mini-batches have a step, and how many tokens each share of the devices is given in an epoch."""

from types import SimpleNamespace
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import pytest
from shapes import one_device_mesh
from small_policy import plain_batch, update_settings

from dapo_jax.data.containers import Mean
from dapo_jax.learner.micro_batches import MicroBatches
from dapo_jax.learner.update import UpdateSettings, _optimizer_steps, sequence_lengths, tokens_of_devices
from dapo_jax.parallel.stopping import unpaced

PROMPTS = np.array([1, 2, 4, 8])  # tokens; two responses to each
RESPONSES = np.array([1, 1, 16, 1, 32, 1, 1, 64])
BATCH = plain_batch(np.arange(8) >= 8 - PROMPTS[:, None], np.arange(64) < RESPONSES[:, None])


def settings_of(micro_batches, mini) -> UpdateSettings:
    return update_settings(micro=micro_batches, mini=mini, lr=0.0, epochs=2)


def tokens(shares, rows, *, mini=8, budget=0):
    micro_batches = MicroBatches(shares, budget, 0 if budget else rows)
    return tokens_of_devices(BATCH, settings_of(micro_batches, mini)).tolist()


class Recorded:
    """A learner whose state is the list of its gradients, which are the summed weights of a mini-batch."""

    def zero_gradients(self, params):
        return 0.0

    def accumulate(self, params, gradients, micro_batch):
        return gradients + float(micro_batch.loss_weights.sum()), {"loss": Mean(jnp.float32(1), jnp.float32(1))}

    def apply(self, state, gradients, learning_rate):
        return SimpleNamespace(params=None, steps=[*state.steps, gradients]), np.float32(1)


def test_a_mini_batch_without_a_token_to_train_on_has_no_step():
    batch = BATCH.replace(loss_mask=BATCH.loss_mask & (np.arange(8) >= 4)[:, None])
    settings = settings_of(MicroBatches(1, rows_per_device=4), mini=4)
    learner, state = cast(Any, Recorded()), cast(Any, SimpleNamespace(params=None, steps=[]))
    state, steps, _ = _optimizer_steps(learner, state, batch, settings, one_device_mesh(), unpaced)
    assert state.steps == pytest.approx([1.0, 1.0]) and len(steps) == 2  # the second half, in each of two epochs


def test_a_sequence_is_a_response_with_its_own_prompt():
    assert sequence_lengths(BATCH).tolist() == [2, 2, 18, 3, 36, 5, 9, 72]


def test_shares_of_micro_batches_add_up_and_rows_of_padding_have_no_tokens():
    assert tokens(2, 4) == [2 + 2 + 18 + 3, 36 + 5 + 9 + 72]
    assert tokens(2, 2) == [2 + 2 + 36 + 5, 18 + 3 + 9 + 72]
    assert tokens(2, 2, mini=4) == tokens(2, 2), "a mini-batch is a micro-batch here"
    assert tokens(1, 8) == [147] and tokens(4, 4) == [25, 122, 0, 0]


def test_token_budgets_divide_the_same_tokens():
    for shares in (1, 2, 4):
        found = tokens(shares, 8, budget=300)
        assert sum(found) == 147 and len(found) == shares
