"""The ranges of slots that tokens see and are seen by, against the pairs themselves."""

import functools

import numpy as np
import pytest
from models.tree_bins import bins_of

from dapo_jax.models.attention import visible_in_bins
from dapo_jax.models.tree_ranges import BRANCH_BEGIN, PROMPT_BEGIN, PROMPT_END, SEEN_TO, in_window, pairs, prepare

T = 256
TREES = [  # of each bin: a prompt and its responses, in slots
    [[5, 100, 1, 60], [30, 10]],
    [[200, 20, 20]],
    [],
    [[1], [3, 4, 4], [40, 180]],
    [[120, *[7] * 10], [2, 60]],
    [[64, 64, 64, 64]],
    [[60, 20, 90, 3], [1, 80]],
    [[30, 2]],
]
WINDOWS = [None, 1, 3, 16, 64, 100, T]


BINS = prepare(bins_of(TREES, T))


@functools.cache
def visible(window: int | None) -> tuple[np.ndarray, np.ndarray]:
    """[N, T, T] what a token sees among the other slots, and among its prompt if it is in a response."""
    of_trees = np.asarray(visible_in_bins(BINS, window)) & (BINS.trees > 0)[:, :, None]
    to_prompt = of_trees & (BINS.branches > 0)[:, :, None] & (BINS.branches == 0)[:, None, :]
    return (of_trees & ~to_prompt) | np.eye(T, dtype=bool), to_prompt  # padding sees itself


@pytest.mark.parametrize("window", WINDOWS)
def test_the_ranges_hold_what_a_token_sees(window):
    slots = np.arange(T)
    ranges = np.asarray(in_window(BINS, window))
    np.testing.assert_array_equal(ranges, in_window(BINS, window, np))
    begin, end, branch, seen_to = (ranges[:, row, :, None] for row in (PROMPT_BEGIN, PROMPT_END, BRANCH_BEGIN, SEEN_TO))
    own, to_prompt = visible(window)
    np.testing.assert_array_equal((slots >= branch) & (slots <= slots[:, None]), own)
    np.testing.assert_array_equal((slots >= begin) & (slots < end), to_prompt)
    last = T - np.argmax((own | to_prompt)[:, ::-1], axis=1)
    assert (seen_to[..., 0] >= last).all()
    alone = BINS.trees[-1] > 0  # the last bin's prompt has one response
    np.testing.assert_array_equal(seen_to[-1, alone, 0], last[-1, alone])


def test_a_window_as_wide_as_a_bin_changes_nothing():
    np.testing.assert_array_equal(in_window(BINS, T), BINS.ranges)


@pytest.mark.parametrize("window", WINDOWS)
def test_the_kernels_compute_the_blocks_in_which_a_token_sees_another(window):
    """Of 64 slots. A block with prompt and branch of a tree counts for each.

    A window may leave out blocks between those that two tokens of a block see in its trees' prompts; they are computed.
    """
    own, to_prompt = (kind.reshape(8, 4, 64, 4, 64).any(axis=(2, 4)) for kind in visible(window))
    first, last = to_prompt.argmax(axis=2), 4 - to_prompt[:, :, ::-1].argmax(axis=2)
    spans = np.where(to_prompt.any(axis=2), last - first, 0).sum(axis=1)
    np.testing.assert_array_equal(pairs(BINS, window) / 64**2, own.sum(axis=(1, 2)) + spans)
