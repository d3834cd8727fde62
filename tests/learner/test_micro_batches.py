import numpy as np
import pytest

from dapo_jax.data.containers import Batch
from dapo_jax.learner.micro_batches import MicroBatches, sharing_rows

PROMPT, RESPONSE = 8, 64


def batch_of(lengths, sharing=1):
    """Each row holds its own number, in its response and (per prompt) in its prompt."""
    rows = len(lengths)
    mask = np.arange(RESPONSE) < np.asarray(lengths)[:, None]
    numbers = np.arange(rows)
    return Batch(
        prompts=np.repeat(numbers[::sharing, None] // sharing, PROMPT, axis=1),
        prompt_mask=np.ones((rows // sharing, PROMPT), bool),
        responses=np.where(mask, numbers[:, None], 0),
        mask=mask,
        loss_mask=mask,
        group_ids=numbers // sharing,
        old_logprobs=np.where(mask, numbers[:, None], 0).astype(np.float32),
        advantages=np.zeros(mask.shape, np.float32),
    )


def lengths_of(rows, seed=0):
    return np.clip(np.random.default_rng(seed).lognormal(2.3, 0.8, rows).astype(int), 1, RESPONSE)


@pytest.mark.parametrize("budget", [None, 80, 300, 10_000])
@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("sharing", [1, 4])
def test_each_row_is_in_one_micro_batch_whole_and_behind_its_prompt(budget, shards, sharing):
    batch = batch_of(lengths_of(48), sharing)
    seen = []
    for rows, piece in MicroBatches(shards, rows_per_device=8, max_tokens_per_device=budget).split(batch):
        seen.extend(rows.tolist())
        width = piece.mask.shape[1]
        np.testing.assert_array_equal(piece.responses[: len(rows)], batch.responses[rows, :width])
        np.testing.assert_array_equal(piece.old_logprobs[: len(rows)], batch.old_logprobs[rows, :width])
        assert (piece.mask[: len(rows)].sum(axis=1) == batch.mask[rows].sum(axis=1)).all()
        assert not piece.mask[len(rows) :].any() and not piece.loss_mask[len(rows) :].any()
        assert (np.repeat(piece.prompts[:, 0], sharing)[: len(rows)] == rows // sharing).all()
        assert len(piece.mask) % shards == 0 and len(piece.prompts) % shards == 0
        if budget is not None:
            per_device = (piece.prompts.size + piece.mask.size) // shards
            assert per_device <= max(budget, PROMPT + sharing * width)
    assert sorted(seen) == list(range(48))


def test_a_token_budget_computes_less_padding_in_few_shapes():
    shapes, by_tokens, by_rows = set(), 0, 0
    for seed in range(20):
        batch = batch_of(lengths_of(64, seed))
        pieces = [piece for _, piece in MicroBatches(2, 8, max_tokens_per_device=400).split(batch)]
        shapes |= {piece.mask.shape for piece in pieces}
        by_tokens += sum(piece.mask.size for piece in pieces)
        by_rows += sum(piece.mask.size for _, piece in MicroBatches(2, 8).split(batch))
    assert by_tokens < 0.45 * by_rows
    assert len(shapes) <= 24


def test_as_many_rows_share_a_prompt_as_fit():
    sizes = {"max_prompt": 100, "max_response": 100, "mini_batch_share": 64}
    assert sharing_rows(16, rows=12, max_tokens=None, **sizes) == 4
    assert sharing_rows(16, rows=8, max_tokens=10_000, **sizes) == 16
    assert sharing_rows(16, rows=8, max_tokens=900, **sizes) == 4  # 128 + 7 x 100 fit, and 4 divides 16
    assert sharing_rows(16, rows=8, max_tokens=200, **sizes) == 1
    assert sharing_rows(16, rows=8, max_tokens=10_000, **{**sizes, "mini_batch_share": 5}) == 4
