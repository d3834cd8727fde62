"""How many tokens each share of the devices is given in an epoch."""

from typing import Any

import numpy as np
import pytest

from dapo_jax.containers import Batch
from dapo_jax.learner.micro_batches import MicroBatches
from dapo_jax.learner.update import UpdateSettings, sequence_lengths, tokens_of_devices

PROMPTS = np.array([1, 2, 4, 8])  # tokens; two responses to each
RESPONSES = np.array([1, 1, 16, 1, 32, 1, 1, 64])


def batch_of() -> Batch:
    mask = np.arange(64) < RESPONSES[:, None]
    empty: Any = np.zeros(mask.shape, np.float32)
    prompt_mask = np.arange(8) >= 8 - PROMPTS[:, None]
    return Batch(
        prompts=prompt_mask.astype(np.int32), prompt_mask=prompt_mask, responses=mask.astype(np.int32), mask=mask,
        loss_mask=mask, group_ids=np.repeat(np.arange(4), 2), old_logprobs=empty, advantages=empty,
    )  # fmt: skip


def tokens(shares, rows, *, mini=8, budget=None):
    settings = UpdateSettings(
        learning_rate=0.0, mini_batch_rows=mini, micro_batches=MicroBatches(shares, rows, budget), epochs=2,
        loss_agg_mode="token-mean", loss_scale_factor=1.0, count_empty_sequences=False,
    )  # fmt: skip
    return tokens_of_devices(batch_of(), settings).tolist()


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
