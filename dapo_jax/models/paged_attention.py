"""Device: attention of one token a row to keys and values in pages, and to a tail of the newest ones.

Sizes: B rows, N query heads, K key-value heads, G = N // K, H head size, C tokens of a page, A pages in memory, M pages
that a row has at most. All arrays are those of one device.

A page holds C tokens of all key-value heads, a key and its value side by side: [K, C, 2H]. A page table lists the pages
of a row in the order of their tokens; several rows may list the same page. One softmax runs over pages and tail: each
gives its parts (arXiv:2205.14135, section 3.1), which are then merged.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from dapo_jax.models.attention import MASKED, matmul


@struct.dataclass
class SoftmaxParts:
    """Attention to some of the keys, before it is divided by the sum of the weights; float32."""

    weighted: jax.Array  # [B, N, H] sum of exp(score - highest) * value
    total: jax.Array  # [B, N] sum of exp(score - highest); 0 without keys
    highest: jax.Array  # [B, N] of the scores; MASKED without keys


# query [B, N, H], pages [A, K, C, 2H], table [B, M] int32, starts [B] int32, ends [B] int32.
# A row attends to the tokens starts <= t < ends of its pages, where token t is number t % C of page table[t // C];
# starts < C. No place of the table outside of them is read.
AttendPages = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array], SoftmaxParts]


def attend_gathered(
    query: jax.Array, pages: jax.Array, table: jax.Array, starts: jax.Array, ends: jax.Array
) -> SoftmaxParts:
    """An `AttendPages` that copies the pages of every row, and as many as the table has places: for CPUs and tests."""
    found = jnp.moveaxis(pages[table], 1, 2)  # [B, K, M, C, 2H]
    found = found.reshape(*found.shape[:2], -1, found.shape[-1])
    tokens = jnp.arange(found.shape[2])
    return _attend(query, found, (starts[:, None] <= tokens) & (tokens < ends[:, None]))


def attend_tail(query: jax.Array, tail: jax.Array, index: jax.Array) -> SoftmaxParts:
    """Attention to the first index + 1 tokens of the tail [B, K, C, 2H] of each row."""
    return _attend(query, tail, (jnp.arange(tail.shape[2]) <= index)[None])


def merged(one: SoftmaxParts, other: SoftmaxParts) -> jax.Array:
    """Attention [B, N, H] to the keys of both; at least one of them has some."""
    highest = jnp.maximum(one.highest, other.highest)
    one_scale, other_scale = jnp.exp(one.highest - highest), jnp.exp(other.highest - highest)
    total = one.total * one_scale + other.total * other_scale
    weighted = one.weighted * one_scale[..., None] + other.weighted * other_scale[..., None]
    return weighted / total[..., None]


def _attend(query: jax.Array, keys_and_values: jax.Array, visible: jax.Array) -> SoftmaxParts:
    """keys_and_values [B, K, T, 2H]; visible [B or 1, T]."""
    rows, heads, size = query.shape
    key, value = keys_and_values[..., :size], keys_and_values[..., size:]
    query = query.reshape(rows, key.shape[1], -1, size)
    scores = matmul("bkgh,bkth->bkgt", query, key) * size**-0.5
    scores = jnp.where(visible[:, None, None], scores, MASKED)
    highest = scores.max(-1)
    weights = jnp.where(visible[:, None, None], jnp.exp(scores - highest[..., None]), 0.0)
    weighted = matmul("bkgt,bkth->bkgh", weights, value)
    return SoftmaxParts(
        weighted.reshape(rows, heads, size), weights.sum(-1).reshape(rows, heads), highest.reshape(rows, heads)
    )
