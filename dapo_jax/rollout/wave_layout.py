"""Host: where the rows of a wave lie on the shards of the batch.

The samples of a prompt lie on up to SPREAD neighbouring shards, since they tend to be equally long: a shard's survivors
then are nearly as many as any other's, and the largest shard sets how many rows all have. Each of these shards has a
copy of the prompt's keys and values. More copies would balance little better and take memory.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

SPREAD = 4  # shards


@dataclass(frozen=True)
class WaveLayout:
    """The rows of a wave, and the parts in which its prompts are prefilled.

    `copies` shards are a block. Prompts are divided over blocks in order; each shard of a block has `own_samples` of
    the samples of each of its block's prompts.
    """

    size: int  # prompts, a multiple of the shards
    num_samples: int  # of a prompt
    shards: int
    width: int  # tokens of a prompt, with padding
    at_once: int  # prompts that each shard prefills in one call, at most

    @property
    def copies(self) -> int:
        """Shards that have samples of one prompt."""
        return math.gcd(SPREAD, self.shards, self.num_samples)

    @property
    def own_samples(self) -> int:
        """Samples of a prompt on a shard that has some."""
        return self.num_samples // self.copies

    @property
    def num_rows(self) -> int:
        """On all shards."""
        return self.size * self.num_samples

    @property
    def num_prompts(self) -> int:
        """On all shards, with copies."""
        return self.size * self.copies

    @property
    def part_size(self) -> int:
        """Prompts of a call of prefill, on all shards: equal parts, as few as `at_once` allows."""
        per_shard = self.size // self.shards
        parts = -(-per_shard // self.at_once)
        return -(-per_shard // parts) * self.shards

    def parts(self) -> Iterator[int]:
        """The first prompt of each part among those of its shard. The last part may repeat some of the one before."""
        local, step = self.num_prompts // self.shards, self.part_size * self.copies // self.shards
        for first in range(0, local, step):
            yield min(first, local - step)

    def rows(self) -> np.ndarray:
        """[num_rows] the sample, prompt * num_samples + its number, of each row."""
        rows = np.arange(self.num_rows).reshape(self.shards // self.copies, -1, self.copies, self.own_samples)
        return rows.swapaxes(1, 2).reshape(-1)

    def prompts(self) -> np.ndarray:
        """[num_prompts] the prompt of each place in the cache."""
        return np.repeat(self._by_block(), self.copies, axis=0).reshape(-1)

    def prefilled(self, first: int) -> np.ndarray:
        """[part_size] the prompts of the part that begins at `first`, in the order in which shards prefill them."""
        return self._by_block()[:, first : first + self.part_size * self.copies // self.shards].reshape(-1)

    def started(self, first: int) -> np.ndarray:
        """[part_size * num_samples] the rows of the wave to which that part gives a first token."""
        rows = np.arange(self.num_rows).reshape(self.shards, -1, self.own_samples)
        return rows[:, first : first + self.part_size * self.copies // self.shards].reshape(-1)

    def _by_block(self) -> np.ndarray:
        return np.arange(self.size).reshape(self.shards // self.copies, -1)
