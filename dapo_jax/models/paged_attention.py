"""Device: attention of one token a row to keys and values in pages, and to a tail of the newest ones.

Sizes: B rows, N query heads, K key-value heads, G = N // K, H head size, C tokens of a page, A pages in memory, M pages
that a row has at most. All arrays are those of one device.

A page holds C tokens of all key-value heads, a key and its value side by side: [K, C, 2H]. A page table lists the pages
of a row in the order of their tokens; several rows may list the same page. One softmax runs over pages and tail: each
gives its parts (arXiv:2205.14135, section 3.1), which are then merged.
"""

import functools
from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import struct

from dapo_jax.models.attention import MASKED, capped, matmul

QUERIES, HEADS = 64, 256  # of a key-value head that read a prompt together, at most; such heads of all these rows


def most_together(groups: int, kv_heads: int) -> int:
    """Rows with one prompt that read it together, at most.

    Args:
        groups: query heads of a key-value head.
        kv_heads: of a device. A TPU keeps the parts of all heads of these rows on its chip.
    """
    return max(min(QUERIES // groups, HEADS // kv_heads), 1)


@struct.dataclass
class SoftmaxParts:
    """Attention to some of the keys, before it is divided by the sum of the weights; float32. [B, N], or other axes."""

    weighted: jax.Array  # [B, N, H] sum of exp(score - highest) * value
    total: jax.Array  # [B, N] sum of exp(score - highest); 0 without keys
    highest: jax.Array  # [B, N] of the scores; MASKED without keys


@struct.dataclass
class Runs:
    """Rows one behind the other that share a prompt, at most `most_together`: a kernel may read it once for a run."""

    lengths: jax.Array  # [B] int32, rows of the run that begins with each row; 0 = none does
    ends: jax.Array  # [B] int32, of each row: its tokens before this one are those of its prompt


@struct.dataclass
class Reads:
    """What rows see of their pages: tokens starts <= t < ends, where token t is number t % C of page table[t // C].

    No place of the table from `ends` on is read. A row sees nothing if it starts where it ends, or later.
    """

    table: jax.Array  # [B, M] int32
    starts: jax.Array  # [B] int32
    ends: jax.Array  # [B] int32
    runs: Runs | None = None


class AttendPages(Protocol):
    """Attention of a token of each row to its pages and to the first index + 1 tokens of its tail.

    Args:
        window: of tokens that end with the one at `index`; only the tail is cut here, pages are by `reads`.
        sink: as in `attention.softmax`, of these heads.
        cap: as in Scores.

    Returns:
        [B, N, H], float32 or in the dtype of the pages.
    """

    def __call__(
        self,
        query: jax.Array,  # [B, N, H]
        pages: jax.Array,  # [A, K, C, 2H]
        tail: jax.Array,  # [B, K, C, 2H]
        index: jax.Array,  # int32
        reads: Reads,
        sink: jax.Array | None = None,  # [N]
        *,
        window: int | None = None,
        cap: float | None = None,
    ) -> jax.Array: ...


def attend_gathered(
    query: jax.Array,
    pages: jax.Array,
    tail: jax.Array,
    index: jax.Array,
    reads: Reads,
    sink: jax.Array | None = None,
    *,
    window: int | None = None,
    cap: float | None = None,
) -> jax.Array:
    """An `AttendPages` that copies the pages of every row, as many as the table has places: where no kernel fits."""
    found = jnp.moveaxis(pages[reads.table], 1, 2)  # [B, K, M, C, 2H]
    found = found.reshape(*found.shape[:2], -1, found.shape[-1])
    tokens = jnp.arange(found.shape[2])
    visible = (reads.starts[:, None] <= tokens) & (tokens < reads.ends[:, None])
    return merged([_attend(query, found, visible, cap), attend_tail(query, tail, index, window, cap)], sink)


def attend_tail(
    query: jax.Array, tail: jax.Array, index: jax.Array, window: int | None = None, cap: float | None = None
) -> SoftmaxParts:
    """Attention to the first index + 1 tokens of the tail [B, K, C, 2H] of each row, and of them to the last `window`.

    Args:
        window, cap: as in Scores.
    """
    tokens = jnp.arange(tail.shape[2])
    visible = tokens <= index
    if window is not None and window < len(tokens):
        visible &= tokens > index - window
    return _attend(query, tail, visible[None], cap)


def merged(parts: Sequence[SoftmaxParts], sink: jax.Array | None = None) -> jax.Array:
    """Attention [..., N, H] to the keys of all parts; at least one of them has some. `sink` [N] as in AttendPages."""
    if sink is not None:
        first = parts[0]
        of_sink = (
            jnp.zeros_like(first.weighted),
            jnp.ones_like(first.total),
            jnp.broadcast_to(sink, first.highest.shape),
        )
        parts = [*parts, SoftmaxParts(*of_sink)]
    highest = functools.reduce(jnp.maximum, [part.highest for part in parts])
    scales = [jnp.exp(part.highest - highest) for part in parts]
    total = sum(part.total * scale for part, scale in zip(parts, scales, strict=True))
    weighted = sum(part.weighted * scale[..., None] for part, scale in zip(parts, scales, strict=True))
    return weighted / jnp.asarray(total)[..., None]


def _attend(query: jax.Array, keys_and_values: jax.Array, visible: jax.Array, cap: float | None) -> SoftmaxParts:
    """keys_and_values [B, K, T, 2H]; visible [B or 1, T]."""
    rows, heads, size = query.shape
    key, value = keys_and_values[..., :size], keys_and_values[..., size:]
    query = query.reshape(rows, key.shape[1], -1, size)
    scores = capped(matmul("bkgh,bkth->bkgt", query, key) * size**-0.5, cap)
    scores = jnp.where(visible[:, None, None], scores, MASKED)
    highest = scores.max(-1)
    weights = jnp.where(visible[:, None, None], jnp.exp(scores - highest[..., None]), 0.0)
    weighted = matmul("bkgt,bkth->bkgh", weights, value)
    return SoftmaxParts(
        weighted.reshape(rows, heads, size), weights.sum(-1).reshape(rows, heads), highest.reshape(rows, heads)
    )
