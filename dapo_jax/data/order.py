"""Host: the row of each prompt number."""

import math
from collections.abc import Sequence
from fractions import Fraction

import grain
import numpy as np

from dapo_jax.errors import InputError


class PromptOrder:
    """An endless order of rows: prompt number q lies in epoch q // num_rows; each epoch has every row once.

    A mixture has such an order for each file, interleaved as evenly as the weights allow; an epoch is num_rows numbers.
    A pure function of the arguments and q: any prompt is found directly, and nothing is saved.

    Args:
        sizes: rows of each file of a mixture, in the order of the rows.
        weights: of each file, above 0.
    """

    def __init__(
        self, num_rows: int, *, seed: int, shuffle: bool, sizes: Sequence[int] = (), weights: Sequence[float] = (1,)
    ):
        if num_rows < 1:
            raise InputError(f"num_rows={num_rows} must be at least 1: give the data set rows")
        self.num_rows, self.sizes = num_rows, tuple(sizes) or (num_rows,)
        self._starts = np.cumsum([0, *self.sizes])
        self._files = [_endless(size, [seed, file], shuffle) for file, size in enumerate(self.sizes)]
        exact = [Fraction(str(weight)) for weight in weights]
        self.shares = [weight / sum(exact[file:]) for file, weight in enumerate(exact)]

    def row(self, q: int) -> int:
        """The row of prompt number `q`, counted from 0."""
        before, after = self.counts(q), self.counts(q + 1)
        file = next(file for file, count in enumerate(before) if count < after[file])
        return int(self._starts[file]) + int(self._files[file][before[file]])  # pyright: ignore[reportArgumentType]

    def counts(self, q: int) -> list[int]:
        """How many of the first `q` numbers are of each file: its share of those that the files before it leave."""
        counts = []
        for share in self.shares:
            counts.append(math.floor(q * share))
            q -= counts[-1]
        return counts

    def files(self, rows: np.ndarray) -> np.ndarray:
        """The file of each row."""
        return np.searchsorted(self._starts, rows, side="right") - 1

    def epoch(self, q: int) -> float:
        """Passes over the rows before prompt number `q`."""
        return q / self.num_rows


def _endless(num_rows: int, address: list[int], shuffle: bool) -> grain.MapDataset:
    """0..num_rows-1 in every epoch, permuted by (address, epoch)."""
    rows = grain.MapDataset.range(num_rows)
    if shuffle:
        # grain permutes epoch e by its seed + e. Hash the seed, or seed 1 would begin with epoch 1 of seed 0.
        rows = rows.shuffle(seed=int(np.random.SeedSequence(address).generate_state(1)[0]))
    return rows.repeat()
