"""Host: the slots that each slot of a bin sees and is seen by, as the kernels of tree_attention.py read them.

A token sees two ranges of slots: the prompt of its tree, if it is in a response, and its branch up to itself. A window
narrows both, on the host to count scores, and on the device for the layers that have one.

Sizes: N bins, T slots.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from dapo_jax.data.containers import Bins

BLOCK = 64  # slots; half as many if a head is larger than 128
PROMPT_BEGIN, PROMPT_END, BRANCH_BEGIN, SEEN_TO = range(4)  # rows of `Bins.ranges`


def rounded_width(width: int) -> int:
    """The width of a bin that whole blocks fill."""
    return -(-width // BLOCK) * BLOCK


def prepare(bins: Bins) -> Bins:
    """Host: adds the ranges of slots that each slot sees, and is seen by. Padding sees itself."""
    trees, branches = bins.trees, bins.branches
    width = trees.shape[1]
    slots = np.broadcast_to(np.arange(width), trees.shape)
    padding, answers = trees == 0, branches > 0
    new_tree = padding | (np.diff(trees, axis=1, prepend=-1) != 0)
    new_branch = new_tree | (np.diff(branches, axis=1, prepend=-1) != 0)
    tree_begin = np.maximum.accumulate(np.where(new_tree, slots, 0), axis=1)
    branch_begin = np.maximum.accumulate(np.where(new_branch, slots, 0), axis=1)
    first_branch = np.maximum.accumulate(np.where(answers & ~np.roll(answers, 1, axis=1), slots, 0), axis=1)
    ends = np.where(answers, _ends(new_branch), _ends(new_tree))
    ranges = np.stack(
        [np.where(answers, tree_begin, width), np.where(answers, first_branch, 0), branch_begin, ends], axis=1
    )
    return dataclasses.replace(bins, ranges=ranges.astype(np.int32))


def _ends(begins: np.ndarray) -> np.ndarray:
    """The slot [N, T] after the last one of each slot's part; `begins` is True where a part begins."""
    width = begins.shape[1]
    following = np.where(np.roll(begins, -1, axis=1), np.arange(1, width + 1), width)
    return np.minimum.accumulate(following[:, ::-1], axis=1)[:, ::-1]


def in_window(bins: Bins, window: int | None, xp: Any = jnp) -> Any:
    """`bins.ranges` [N, 4, T], narrowed to a window.

    Args:
        xp: the module of the arrays, jnp or np.
    """
    if window is None:
        return bins.ranges
    begin, end, branch, seen_to = (bins.ranges[:, row] for row in (PROMPT_BEGIN, PROMPT_END, BRANCH_BEGIN, SEEN_TO))
    slots, width = xp.arange(begin.shape[1]), begin.shape[1]
    from_prompt = begin + xp.maximum(bins.positions - window + 1, 0)
    reaches = from_prompt < end
    # The last token that sees a key is in the last branch of its part, if the window reaches from the key to branches.
    last = xp.take_along_axis(branch, seen_to - 1, axis=1)
    behind = bins.positions + window - xp.take_along_axis(bins.positions, last, axis=1)
    return xp.stack(
        [
            xp.where(reaches, from_prompt, width),
            xp.where(reaches, end, 0),
            xp.maximum(branch, slots - window + 1),
            xp.minimum(seen_to, xp.where(behind > 0, last + behind, slots + window)),
        ],
        axis=1,
    )


def pairs(bins: Bins, window: int | None = None) -> np.ndarray:
    """Host: [N] scores that are computed, in blocks of BLOCK slots."""
    ranges = in_window(bins, window, np)
    blocks = ranges.reshape(*ranges.shape[:2], -1, BLOCK)
    of_prompts = -(-blocks[:, PROMPT_END].max(axis=2) // BLOCK) - blocks[:, PROMPT_BEGIN].min(axis=2) // BLOCK
    own = np.arange(1, blocks.shape[2] + 1) - blocks[:, BRANCH_BEGIN].min(axis=2) // BLOCK
    return (np.maximum(of_prompts, 0) + own).sum(axis=1) * float(BLOCK) ** 2
