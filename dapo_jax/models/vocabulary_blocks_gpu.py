"""Device: the logits of decoding with the highest and the sum of the weights of each block, in one Triton kernel.

The product's own tiles are blocks of the vocabulary. So a draw reads two numbers of each block and one block of each
row, where it would read all logits twice after they are written. Sizes as in vocabulary_blocks.py; n blocks.
"""

import functools

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
    """The `block_logits` of hidden states [B, D], divided by the temperature, with their sums.

    Args:
        params: decoding weights, whose tables have whole blocks on each device, see `with_whole_blocks`.
        interpret: run the kernel in Pallas' interpreter, on any device.
    """
    table = head_table(params)
    first = jnp.arange(len(table) // BLOCK, dtype=jnp.int32) * BLOCK
    local = functools.partial(_product, arch=arch, interpret=interpret)
    in_specs = on_mesh((TABLE, TABLE, BATCH, PartitionSpec()))
    of_shards = jax.shard_map(local, in_specs=in_specs, out_specs=on_mesh(SCORES), check_vma=False)
    return of_shards(table, first, hidden.astype(table.dtype), jnp.reshape(temperature, 1))


def _product(
    table: jax.Array,
    first: jax.Array,
    hidden: jax.Array,
    temperature: jax.Array,
    *,
    arch: Architecture,
    interpret: bool,
) -> BlockSums:
    """On one device; `first` [n] is the first token of each block."""
    (rows, _), blocks = hidden.shape, len(first)
    high = min(ROWS, max(LEAST_ROWS, 1 << (rows - 1).bit_length()))
    shapes = (rows, blocks, BLOCK), (blocks, rows), (blocks, rows)
    logits, highest, totals = pl.pallas_call(
        functools.partial(_kernel, high=high, cap=arch.logit_cap, vocab_size=arch.vocab_size),
        grid=(pl.cdiv(rows, high), blocks),
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
        compiler_params=triton.CompilerParams(num_warps=8 if high == ROWS else 4, num_stages=3),
        interpret=interpret,
        name="block_sums",
    )(table, first, hidden, temperature)
    return BlockSums(logits, highest.T, totals.T)


def _kernel(
    table_ref, first_ref, hidden_ref, temperature_ref, logits_ref, highest_ref, totals_ref, *, high, cap, vocab_size
):
    """One block of the vocabulary, for some rows."""
    number, block = pl.program_id(0), pl.program_id(1)
    rows = pl.ds(number * high, high)
    real = number * high + jnp.arange(high) < len(hidden_ref)
    wide = {size: jnp.broadcast_to(real[:, None], (high, size)) for size in (INNER, BLOCK)}

    def step(place, found):
        there = pl.ds(place * INNER, INNER)
        hidden = triton.load(hidden_ref.at[rows, there], mask=wide[INNER], other=0.0)
        return found + dot(hidden, table_ref[pl.ds(block * BLOCK, BLOCK), there].T)

    steps = hidden_ref.shape[1] // INNER
    logits = jax.lax.fori_loop(0, steps, step, jnp.zeros((high, BLOCK), jnp.float32))
    logits = capped(logits, cap) / temperature_ref[0]
    logits = jnp.where((first_ref[block] + jnp.arange(BLOCK) < vocab_size)[None], logits, -jnp.inf)
    highest = jnp.maximum(jnp.max(logits, axis=1), MASKED)  # finite, so that a block without tokens has no NaN
    totals = jnp.sum(jnp.exp(logits - highest[:, None]), axis=1)
    triton.store(logits_ref.at[rows, block, :], logits, mask=wide[BLOCK])
    triton.store(highest_ref.at[block, rows], highest, mask=real)
    triton.store(totals_ref.at[block, rows], totals, mask=real)
