"""Which mini-batches have a step, and how many tokens each share of the devices is given in an epoch."""

import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.data.containers import Batch, Mean
from dapo_jax.learner.micro_batches import MicroBatches
from dapo_jax.learner.update import UpdateSettings, _optimizer_steps, sequence_lengths, tokens_of_devices
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.parallel.stopping import unpaced

PROMPTS = np.array([1, 2, 4, 8])  # tokens; two responses to each
RESPONSES = np.array([1, 1, 16, 1, 32, 1, 1, 64])


def batch_of() -> Batch:
    mask = np.arange(64) < RESPONSES[:, None]
    empty: Any = np.zeros(mask.shape, np.float32)
    prompt_mask = np.arange(8) >= 8 - PROMPTS[:, None]
    return Batch(
        prompts=prompt_mask.astype(np.int32),
        prompt_mask=prompt_mask,
        responses=mask.astype(np.int32),
        mask=mask,
        loss_mask=mask,
        group_ids=np.repeat(np.arange(4), 2),
        old_logprobs=empty,
        advantages=empty,
    )


def settings_of(micro_batches, mini) -> UpdateSettings:
    return UpdateSettings(
        learning_rate=0.0,
        mini_batch_rows=mini,
        micro_batches=micro_batches,
        epochs=2,
        loss_agg_mode="token-mean",
        loss_scale_factor=1.0,
        count_empty_sequences=False,
    )


def tokens(shares, rows, *, mini=8, budget=0):
    return tokens_of_devices(
        batch_of(), settings_of(MicroBatches(shares, budget, 0 if budget else rows), mini)
    ).tolist()


class Recorded:
    """A learner whose state is the list of its gradients, which are the summed weights of a mini-batch."""

    def zero_gradients(self, params):
        return 0.0

    def accumulate(self, params, gradients, micro_batch):
        return gradients + float(micro_batch.loss_weights.sum()), {"loss": Mean(jnp.float32(1), jnp.float32(1))}

    def apply(self, state, gradients, learning_rate):
        return SimpleNamespace(params=None, steps=[*state.steps, gradients]), np.float32(1)


def test_a_mini_batch_without_a_token_to_train_on_has_no_step():
    batch = batch_of()
    batch = dataclasses.replace(batch, loss_mask=batch.loss_mask & (np.arange(8) >= 4)[:, None])
    settings = settings_of(MicroBatches(1, rows_per_device=4), mini=4)
    learner, state = cast(Any, Recorded()), cast(Any, SimpleNamespace(params=None, steps=[]))
    state, steps, _ = _optimizer_steps(learner, state, batch, settings, make_mesh(1, 1, 1, jax.devices()[:1]), unpaced)
    assert state.steps == pytest.approx([1.0, 1.0]) and len(steps) == 2  # the second half, in each of two epochs


def test_a_sequence_is_a_response_with_its_own_prompt():
    assert sequence_lengths(batch_of()).tolist() == [2, 2, 18, 3, 36, 5, 9, 72]


def test_shares_of_micro_batches_add_up():
    assert tokens(2, 4) == [2 + 2 + 18 + 3, 36 + 5 + 9 + 72]
    assert tokens(2, 2) == [2 + 2 + 36 + 5, 18 + 3 + 9 + 72]
    assert tokens(2, 2, mini=4) == tokens(2, 2), "a mini-batch is a micro-batch here"
    assert tokens(1, 8) == [147]


def test_rows_of_padding_have_no_tokens():
    assert tokens(4, 4) == [25, 122, 0, 0]


@pytest.mark.parametrize("shares", [1, 2, 4])
def test_token_budgets_divide_the_same_tokens(shares):
    found = tokens(shares, 8, budget=300)
    assert sum(found) == 147 and len(found) == shares
