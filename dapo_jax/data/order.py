"""Host: the row of each prompt number."""

import grain
import numpy as np

from dapo_jax.errors import InputError


class PromptOrder:
    """An endless order of rows: prompt number q lies in epoch q // num_rows; each epoch has every row once.

    A pure function of (num_rows, seed, shuffle) and q: any prompt is found directly, and nothing is saved.
    """

    def __init__(self, num_rows: int, *, seed: int, shuffle: bool):
        if num_rows < 1:
            raise InputError(f"num_rows={num_rows} must be at least 1: give the data set rows")
        self.num_rows = num_rows
        rows = grain.MapDataset.range(num_rows)
        if shuffle:
            # grain permutes epoch e by its seed + e. Hash the seed, or seed 1 would begin with epoch 1 of seed 0.
            rows = rows.shuffle(seed=int(np.random.SeedSequence(seed).generate_state(1)[0]))
        self._rows = rows.repeat()

    def row(self, q: int) -> int:
        """The row of prompt number `q`, counted from 0."""
        return self._rows[q]  # pyright: ignore[reportReturnType]

    def epoch(self, q: int) -> float:
        """Passes over the rows before prompt number `q`."""
        return q / self.num_rows
