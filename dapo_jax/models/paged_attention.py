"""Device: attention of one token a row to keys and values in pages, and to a tail of the newest ones.

Sizes: B rows, N query heads, K key-value heads, G = N // K, H head size, C tokens of a page, A pages in memory, M pages
that a row has at most. All arrays are those of one device.

A page holds C tokens of all key-value heads, a key and its value side by side: [K, C, 2H]. A page table lists the pages
of a row in the order of their tokens; several rows may list the same page. One softmax runs over pages and tail: each
gives its parts (arXiv:2205.14135, section 3.1), which are then merged.
"""

from typing import Protocol

import jax
import jax.numpy as jnp
from flax import struct

from dapo_jax.models.attention import MASKED, capped, matmul


@struct.dataclass
class SoftmaxParts:
    """Attention to some of the keys, before it is divided by the sum of the weights; float32."""

    weighted: jax.Array  # [B, N, H] sum of exp(score - highest) * value
    total: jax.Array  # [B, N] sum of exp(score - highest); 0 without keys
    highest: jax.Array  # [B, N] of the scores; MASKED without keys


class AttendPages(Protocol):
    """Attention to the tokens starts <= t < ends of each row's pages: token t is number t % C of page table[t // C].

    No place of the table from `ends` on is read. A row has no keys if it starts where it ends, or later.
    """

    def __call__(
        self,
        query: jax.Array,  # [B, N, H]
        pages: jax.Array,  # [A, K, C, 2H]
        table: jax.Array,  # [B, M] int32
        starts: jax.Array,  # [B] int32
        ends: jax.Array,  # [B] int32
        *,
        cap: float | None = None,  # as in Scores
    ) -> SoftmaxParts: ...


def attend_gathered(
    query: jax.Array,
    pages: jax.Array,
    table: jax.Array,
    starts: jax.Array,
    ends: jax.Array,
    *,
    cap: float | None = None,
) -> SoftmaxParts:
    """An `AttendPages` that copies the pages of every row, as many as the table has places: where no kernel fits."""
    found = jnp.moveaxis(pages[table], 1, 2)  # [B, K, M, C, 2H]
    found = found.reshape(*found.shape[:2], -1, found.shape[-1])
    tokens = jnp.arange(found.shape[2])
    return _attend(query, found, (starts[:, None] <= tokens) & (tokens < ends[:, None]), cap)


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


def merged(one: SoftmaxParts, other: SoftmaxParts) -> jax.Array:
    """Attention [B, N, H] to the keys of both; at least one of them has some."""
    highest = jnp.maximum(one.highest, other.highest)
    one_scale, other_scale = jnp.exp(one.highest - highest), jnp.exp(other.highest - highest)
    total = one.total * one_scale + other.total * other_scale
    weighted = one.weighted * one_scale[..., None] + other.weighted * other_scale[..., None]
    return weighted / total[..., None]


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
