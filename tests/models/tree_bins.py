"""Bins of prompts and their responses, written as the slots that each takes."""

import numpy as np

from dapo_jax.data.containers import Bins


def bins_of(trees_of_bins: list[list[list[int]]], width: int) -> Bins:
    """Of each bin the trees, of each tree the slots of a prompt and then of each of its responses."""
    trees, branches, positions = np.zeros((3, len(trees_of_bins), width), np.int32)
    for row, of_bin in enumerate(trees_of_bins):
        slot = branch = 0
        for number, (prompt, *responses) in enumerate(of_bin, start=1):
            for place, length in enumerate((prompt, *responses)):
                here, slot, branch = slice(slot, slot + length), slot + length, branch + (place > 0)
                trees[row, here], branches[row, here] = number, branch if place else 0
                positions[row, here] = np.arange(length) + (prompt if place else 0)
    return Bins(tokens=trees, positions=positions, trees=trees, branches=branches)
