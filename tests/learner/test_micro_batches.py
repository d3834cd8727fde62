import dataclasses

import numpy as np
import pytest
from small_policy import plain_batch

from dapo_jax.learner.micro_batches import MicroBatches
from dapo_jax.models.attention import XLA, visible_in_bins
from dapo_jax.models.flops import TokenFlops
from dapo_jax.models.fused_attention import CUDNN, SPLASH, TRITON

PROMPTS, SAMPLES, PROMPT, RESPONSE = 12, 4, 8, 64
COPIES = dataclasses.replace(XLA, shared_width=0)
KINDS = {
    "shared": XLA,
    "copies": COPIES,
    "splash": SPLASH,
    "triton": TRITON,
    "cudnn": CUDNN,
    "one by one": dataclasses.replace(CUDNN, packs=False),
}


def batch_of(seed=0):
    """Prompts of 1 to 8 tokens and responses of 0 to 64; each token names its row and column."""
    rng = np.random.default_rng(seed)
    rows = PROMPTS * SAMPLES
    lengths = np.clip(rng.lognormal(2.3, 0.8, rows).astype(int), 1, RESPONSE)
    lengths[7] = 0
    mask = np.arange(RESPONSE) < lengths[:, None]
    prompt_mask = np.arange(PROMPT) >= PROMPT - rng.integers(1, PROMPT + 1, PROMPTS)[:, None]
    names = 1000 * np.arange(1, rows + 1)[:, None] + np.arange(RESPONSE)
    return plain_batch(
        prompt_mask,
        mask,
        prompts=np.where(prompt_mask, 1 + np.arange(PROMPTS)[:, None] * PROMPT + np.arange(PROMPT), 0),
        responses=np.where(mask, names, 0),
        loss_mask=mask & (names % 3 > 0),
        old_logprobs=np.where(mask, names, 0).astype(np.float32),
    )


def sequence(batch, row):
    """The tokens of a prompt and the response in `row`."""
    prompt = row // SAMPLES
    return [*batch.prompts[prompt][batch.prompt_mask[prompt]], *batch.responses[row][batch.mask[row]]]


@pytest.mark.parametrize("attention", KINDS.values(), ids=list(KINDS))
@pytest.mark.parametrize(("shards", "tokens", "parts"), [(1, 300, 1), (4, 80, 1), (2, 160, 3)])
def test_each_token_sees_its_prompt_and_response_in_order(attention, shards, tokens, parts):
    """In passes of no more tokens than a device may have; values of a micro-batch find their places in the batch.

    Each of the `parts` devices of a share predicts from its own slots.
    """
    batch, found, longest = batch_of(), [], max(len(sequence(batch_of(), row)) - 1 for row in range(48))
    written = np.zeros(batch.mask.shape, np.float32)
    for piece in MicroBatches(shards, max_tokens_per_device=tokens, attention=attention, parts=parts).split(batch):
        packed, bins = piece.micro_batch, piece.micro_batch.bins
        assert len(bins.tokens) % shards == 0 and len(packed.mask) == shards
        assert parts > 1 or bins.tokens.size // shards <= attention.rounded(max(tokens, longest))
        assert bins.tokens.shape[1] % parts == packed.mask.shape[1] % parts == 0
        width, predicted = bins.tokens.shape[1] // parts, packed.mask.shape[1] // parts
        piece.write(packed.old_logprobs, written)
        visible = np.asarray(visible_in_bins(bins))
        for share, target in np.argwhere(packed.mask):
            row, column = piece.rows[share, target], piece.columns[share, target]
            number, source = divmod(packed.sources[share, target], width)
            source += target // predicted * width
            number += share * len(bins.tokens) // shards
            seen = np.flatnonzero(visible[number, source])
            whole = sequence(batch, row)
            behind = len(whole) - batch.mask[row].sum() + column
            assert bins.tokens[number][seen].tolist() == whole[:behind]
            assert bins.positions[number][seen].tolist() == list(range(behind))
            assert packed.responses[share, target] == whole[behind] == packed.old_logprobs[share, target]
            assert packed.loss_mask[share, target] == batch.loss_mask[row, column]
            found.append((row, column))
        for rows, numbers in zip(piece.rows, packed.sequences, strict=True):
            assert len({*zip(rows, numbers, strict=True)}) == len({*rows}) and ((rows < 0) == (numbers == 0)).all()
    assert sorted(found) == [tuple(place) for place in np.argwhere(batch.mask)]
    np.testing.assert_array_equal(written, batch.old_logprobs)


def test_by_rows_each_bin_has_one_row_in_order():
    batch = batch_of()
    pieces = list(MicroBatches(2, rows_per_device=3).split(batch))
    assert [piece.micro_batch.bins.tokens.shape for piece in pieces] == [(6, PROMPT + RESPONSE)] * 8
    rows = [[row for row in dict.fromkeys(share) if row >= 0] for piece in pieces for share in piece.rows.tolist()]
    assert rows == [[row for row in range(start, start + 3) if row != 7] for start in range(0, 48, 3)]


def test_a_batch_without_responses_has_no_micro_batch():
    empty = batch_of()
    empty = empty.replace(mask=empty.mask & False)
    assert list(MicroBatches(1, max_tokens_per_device=100).split(empty)) == []


def test_work_is_counted_in_operations():
    """A prompt of two tokens with responses of one and three: slots a b | c d, whose last tokens predict nothing."""
    batch = plain_batch(np.ones((1, 2), bool), np.arange(3) < np.array([[1], [3]]))
    split = MicroBatches(1, max_tokens_per_device=6, flops=TokenFlops(layers=1.0, head=100.0, pair=10_000.0))
    assert split.needed(batch) == 4 + 4 * 100 + (1 + 2 + 3 + 4) * 10_000
    (piece,) = split.split(batch)
    assert piece.micro_batch.bins.tokens.shape == (1, 4) and piece.micro_batch.sources.shape == (1, 4)
    assert split.computed(piece) == 4 + 4 * 100 + 16 * 10_000
    copies = dataclasses.replace(split, attention=COPIES)
    assert sum(map(copies.computed, copies.split(batch))) > split.computed(piece)


def test_a_window_limits_the_pairs_of_the_layers_that_have_it():
    """A prompt of three tokens with a response of four, whose last predicts nothing; half of the layers see two."""
    flops = TokenFlops(layers=0.0, head=0.0, pair=1.0, windows=((None, 0.5), (2, 0.5)))
    assert flops.of_prompts(np.array([3])) == (1 + 2 + 3) / 2 + (1 + 2 + 2) / 2
    assert flops.of_responses(np.array([3]), np.array([[4]])) == (4 + 5 + 6) / 2 + (2 + 2 + 2) / 2
    assert flops.of_responses(np.array([1]), np.array([[3, 0]])) == (2 + 3) / 2 + (2 + 2) / 2
    batch, flops = batch_of(), dataclasses.replace(flops, layers=1.0)
    for attention in (CUDNN, TRITON):
        split = MicroBatches(1, max_tokens_per_device=300, attention=attention, flops=flops)
        for piece in split.split(batch):
            all_pairs, near = (attention.pairs(piece.micro_batch.bins, window).sum() for window in (None, 2))
            assert near <= all_pairs and split.slowest_pairs(piece) == (all_pairs + near) / 2
