"""Host: splits a mini-batch into micro-batches, which fit a forward and backward pass, by rows or by tokens.

Which rows a mini-batch holds never depends on their lengths; which of them share a micro-batch may, as the loss is a
sum over micro-batches. Every device gets equally many rows of equal width.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import jax
import numpy as np

from dapo_jax.data.containers import Batch
from dapo_jax.data.padding import bucket


@dataclass(frozen=True)
class MicroBatches:
    """How rows are split into forward and backward passes."""

    num_shards: int  # devices that rows are sharded over
    rows_per_device: int
    max_tokens_per_device: int | None = None  # prompts and responses with their padding; None: by rows

    def split(self, batch: Batch) -> Iterator[tuple[np.ndarray, Batch]]:
        """Each micro-batch, with rows of padding appended, and the numbers of its rows.

        Rows that share a prompt stay together. By tokens, the longest responses come first, and columns that are
        padding in every row of a micro-batch are cut off.
        """
        units, length = len(batch.prompts), batch.mask.shape[1]
        sharing = len(batch.mask) // units
        if self.max_tokens_per_device is None:
            size = self.rows_per_device * self.num_shards // sharing
            for start in range(0, units, size):
                chosen = np.arange(start, min(start + size, units))
                yield _rows(chosen, sharing), select(batch, chosen, size, length)
            return
        longest = batch.mask.sum(axis=1).reshape(units, sharing).max(axis=1)
        order = np.argsort(-longest, kind="stable")
        while len(order):
            width = min(bucket(int(longest[order[0]])), length)
            tokens = batch.prompts.shape[1] + sharing * width
            size = max(self.max_tokens_per_device // tokens, 1)
            chosen, order = np.split(order, [size * self.num_shards])
            while (size + 1) // 2 * self.num_shards >= len(chosen) and size > 1:
                size = (size + 1) // 2  # the last, smaller one: few shapes, little padding
            yield _rows(chosen, sharing), select(batch, chosen, size * self.num_shards, width)


def sharing_rows(
    samples: int, *, rows: int, max_tokens: int | None, max_prompt: int, max_response: int, mini_batch_share: int
) -> int:
    """How many samples of a group may share one prompt in a micro-batch: a divisor of `samples`.

    Args:
        rows: of a micro-batch on one device, without a token budget.
        max_tokens: of a micro-batch on one device, or None.
        max_prompt, max_response: tokens.
        mini_batch_share: responses of a mini-batch for each device, so that none is left without a prompt.
    """
    if max_tokens is None:
        return int(np.gcd(samples, rows))
    fitting = min((max_tokens - bucket(max_prompt)) // max_response, mini_batch_share)
    return max(share for share in range(1, samples + 1) if samples % share == 0 and share <= max(fitting, 1))


def select(batch: Batch, units: np.ndarray, size: int, length: int) -> Batch:
    """The rows of the prompts `units`, cut to `length` response tokens, and rows of zeros up to `size` prompts.

    The masks of those rows are False, so they change nothing.
    """
    num_units, full = len(batch.prompts), batch.mask.shape[1]
    rest = {name: value for name, value in vars(batch).items() if name not in ("prompts", "prompt_mask")}

    def take(x: np.ndarray) -> np.ndarray:
        x = x.reshape(num_units, -1, *x.shape[1:])[units]
        x = np.pad(x, ((0, size - len(units)),) + ((0, 0),) * (x.ndim - 1))
        return x.reshape(-1, *x.shape[2:])

    def cut(x: np.ndarray) -> np.ndarray:
        return take(x[:, :length] if x.shape[1:] == (full,) else x)

    return Batch(prompts=take(batch.prompts), prompt_mask=take(batch.prompt_mask), **jax.tree.map(cut, rest))


def _rows(units: np.ndarray, sharing: int) -> np.ndarray:
    return (units[:, None] * sharing + np.arange(sharing)).ravel()
