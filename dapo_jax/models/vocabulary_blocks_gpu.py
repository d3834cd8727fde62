"""Device: draws from the logits of decoding, which are never written to memory, in two Triton kernels.

The tiles of the head's product are blocks of the vocabulary: the first kernel keeps of each tile its highest logit and
the sum of its weights, by which a block is drawn. The second computes that block again, for each row. Sizes as in
vocabulary_blocks.py; n blocks.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.sharding import PartitionSpec

from dapo_jax.models.architecture import Architecture
from dapo_jax.models.attention import MASKED, capped, dot
from dapo_jax.models.layers import Params
from dapo_jax.models.transformer import head_table
from dapo_jax.models.vocabulary_blocks import BLOCK, BlockSums
from dapo_jax.parallel.mesh import BATCH_AXES
from dapo_jax.parallel.sharding import on_mesh

ROWS, INNER = 128, 64  # of a tile; hidden sizes are multiples of INNER
LEAST_ROWS = 16  # of an operand of a product in Triton
BATCH, TABLE = PartitionSpec(BATCH_AXES), PartitionSpec("tensor")
SCORES = PartitionSpec(BATCH_AXES, "tensor")


def block_sums(
    params: Params, hidden: jax.Array, temperature: jax.Array, arch: Architecture, *, interpret: bool = False
) -> BlockSums:
    """What a draw needs of the `block_logits` of hidden states [B, D], divided by the temperature.

    Args:
        params: decoding weights, whose tables have whole blocks on each device, see `with_whole_blocks`.
        interpret: run the kernels in Pallas' interpreter, on any device.
    """
    table = head_table(params)
    first = jnp.arange(len(table) // BLOCK, dtype=jnp.int32) * BLOCK
    of_all = table, first, hidden.astype(table.dtype), jnp.reshape(temperature, 1)

    def of_shards(local: Callable[..., Any], out_specs: Any, *by_row: jax.Array) -> Any:
        in_specs = TABLE, TABLE, BATCH, PartitionSpec(), *[BATCH] * len(by_row)
        local = functools.partial(local, cap=arch.logit_cap, vocab_size=arch.vocab_size, interpret=interpret)
        call = jax.shard_map(local, in_specs=on_mesh(in_specs), out_specs=on_mesh(out_specs), check_vma=False)
        return call(*of_all, *by_row)

    highest, totals = of_shards(_sums, (SCORES, SCORES))
    return BlockSums(highest, totals, functools.partial(of_shards, _logits, BATCH))


def _sums(
    table: jax.Array, first: jax.Array, hidden: jax.Array, temperature: jax.Array, *, interpret: bool, **of_head: Any
) -> tuple[jax.Array, jax.Array]:
    """`BlockSums` highest and totals [B, n] of the blocks of a device; `first` [n] is the first token of each."""
    rows, blocks = len(hidden), len(first)
    high = min(ROWS, max(LEAST_ROWS, 1 << (rows - 1).bit_length()))
    highest, totals = pl.pallas_call(
        functools.partial(_kernel_of_sums, high=high, **of_head),
        grid=(pl.cdiv(rows, high), blocks),
        out_shape=[jax.ShapeDtypeStruct((blocks, rows), jnp.float32)] * 2,
        compiler_params=triton.CompilerParams(num_warps=8 if high == ROWS else 4, num_stages=3),
        interpret=interpret,
        name="block_sums",
    )(table, first, hidden, temperature)
    return highest.T, totals.T


def _logits(
    table: jax.Array,
    first: jax.Array,
    hidden: jax.Array,
    temperature: jax.Array,
    chosen: jax.Array,
    *,
    interpret: bool,
    **of_head: Any,
) -> jax.Array:
    """The logits [B, BLOCK] of the block `chosen` [B] for each row, from the device along "tensor" that has it."""
    logits = pl.pallas_call(
        functools.partial(_kernel_of_logits, **of_head),
        grid=(len(hidden),),
        out_shape=jax.ShapeDtypeStruct((len(hidden), BLOCK), jnp.float32),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="chosen_block",
    )(table, first, hidden, temperature, chosen - first[0] // BLOCK)
    return jax.lax.psum(logits, "tensor")


def _kernel_of_sums(*refs, high, **of_head):
    """One block of the vocabulary, for some rows."""
    *refs, highest_ref, totals_ref = refs
    number, block = pl.program_id(0), pl.program_id(1)
    rows = pl.ds(number * high, high)
    real = number * high + jnp.arange(high) < highest_ref.shape[1]
    logits = _tile(refs, block, rows, real, **of_head)
    highest = jnp.maximum(jnp.max(logits, axis=1), MASKED)  # finite, so that a block without tokens has no NaN
    totals = jnp.sum(jnp.exp(logits - highest[:, None]), axis=1)
    triton.store(highest_ref.at[block, rows], highest, mask=real)
    triton.store(totals_ref.at[block, rows], totals, mask=real)


def _kernel_of_logits(*refs, **of_head):
    """The block that one row has drawn; zeros if another device has it."""
    *refs, chosen_ref, logits_ref = refs
    row, blocks = pl.program_id(0), len(refs[1])  # with a first token each
    block, is_first = chosen_ref[row], jnp.arange(LEAST_ROWS) == 0
    here = (block >= 0) & (block < blocks)
    logits = _tile(refs, jnp.clip(block, 0, blocks - 1), pl.ds(row, LEAST_ROWS), is_first & here, **of_head)
    logits_ref[row, :] = jnp.sum(jnp.where((is_first & here)[:, None], logits, 0.0), axis=0)


def _tile(refs, block, rows, real, *, cap, vocab_size):
    """Logits [rows, BLOCK] of a block of the vocabulary; only `real` rows are read."""
    table_ref, first_ref, hidden_ref, temperature_ref = refs
    wide = jnp.broadcast_to(real[:, None], (len(real), INNER))

    def step(place, found):
        there = pl.ds(place * INNER, INNER)
        hidden = triton.load(hidden_ref.at[rows, there], mask=wide, other=0.0)
        return found + dot(hidden, table_ref[pl.ds(block * BLOCK, BLOCK), there].T)

    steps = hidden_ref.shape[1] // INNER
    logits = jax.lax.fori_loop(0, steps, step, jnp.zeros((len(real), BLOCK), jnp.float32))
    logits = capped(logits, cap) / temperature_ref[0]
    return jnp.where((first_ref[block] + jnp.arange(BLOCK) < vocab_size)[None], logits, -jnp.inf)
