"""Device: the vocabulary in blocks of 128 tokens, the form in which decoding has its logits.

The sampler draws a block first and then a token in it. With a dimension for each in the product's output, no copy of
the logits is needed on a TPU, and none of them leaves its device along "tensor" if each holds whole blocks.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dapo_jax.models.architecture import Architecture
from dapo_jax.models.attention import capped, matmul
from dapo_jax.models.layers import Params
from dapo_jax.models.transformer import head_table

BLOCK = 128  # tokens
TABLES = "embedding", "head"


class BlockSums(NamedTuple):
    """What a draw of any token needs to know of logits [B, n, BLOCK], which need not be in memory; float32."""

    highest: jax.Array  # [B, n]
    totals: jax.Array  # [B, n] sum of exp(logit - highest of the block)
    logits_in: Callable[[jax.Array], jax.Array]  # a block of each row [B] -> its logits [B, BLOCK]


def with_whole_blocks(params: Params, shards: int) -> Params:
    """`params` with zero rows after the tables of tokens, so that each of `shards` shards holds whole blocks."""
    return {**params, **{name: _padded(params[name], BLOCK * shards) for name in TABLES if name in params}}


def block_logits(params: Params, hidden: jax.Array, arch: Architecture) -> jax.Array:
    """The `logits` [B, D] -> [B, n, BLOCK] of decoding weights, in blocks; -inf after the last token.

    The tables have V rows or more, see `with_whole_blocks`.
    """
    table = _padded(head_table(params), BLOCK)
    scores = matmul("bd,nkd->bnk", hidden, table.reshape(-1, BLOCK, table.shape[-1]))
    scores = capped(scores, arch.logit_cap)
    if len(table) == arch.vocab_size:
        return scores
    return jnp.where(tokens_of_blocks(scores) < arch.vocab_size, scores, -jnp.inf)


def tokens_of_blocks(logits: jax.Array) -> jax.Array:
    """The token [n, BLOCK] int32 of each logit of a row of [B, n, BLOCK]."""
    return jnp.arange(logits[0].size, dtype=jnp.int32).reshape(logits.shape[1:])


def _padded(table: jax.Array, multiple: int) -> jax.Array:
    """[V, D] with rows of zeros up to a multiple."""
    return jnp.pad(table, ((0, -len(table) % multiple), (0, 0)))
