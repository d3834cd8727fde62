"""Device: grouped products in Triton kernels, on GPUs or in Pallas' interpreter.

A program multiplies a block of rows of one group by some columns of its weights. Sizes as in grouped_products.py.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from dapo_jax.models.attention import dot
from dapo_jax.models.row_blocks import block_rows, in_groups, row_blocks

COLUMNS = 128  # of a program's result
INNER_BYTES = 128  # of a row or a column that a program multiplies at once


@functools.partial(jax.jit, static_argnames=("transposed", "interpret"))
def products(
    x: jax.Array, weights: jax.Array, sizes: jax.Array, *, transposed: bool, interpret: bool = False
) -> jax.Array:
    """[M, N] float32 of x [M, K] and weights [E, K, N], or [E, N, K] if `transposed`.

    Args:
        interpret: run the kernel in Pallas' interpreter, on any device.
    """
    rows, columns = len(x), weights.shape[1 if transposed else 2]
    block = block_rows(rows, len(sizes))
    inner, width = _fitting(x.shape[1], INNER_BYTES // x.dtype.itemsize), _fitting(columns, COLUMNS)
    of_weight = (width, inner) if transposed else (inner, width)
    x, weights = _padded(x, block, inner), _padded_columns(weights, 1, of_weight)
    blocks = row_blocks(sizes, rows, block)
    padded = -(-columns // width) * width
    found = pl.pallas_call(
        functools.partial(_products_kernel, sizes=(block, inner, width), transposed=transposed),
        grid=(padded // width, len(blocks.group)),  # a block's columns together: its rows are then in the cache
        out_shape=jax.ShapeDtypeStruct((len(x), padded), jnp.float32),
        name="grouped_products",
        **_options(block, interpret),
    )(x, weights, *blocks)
    return in_groups(found[:rows, :columns], sizes)


def _products_kernel(x_ref, weights_ref, group_ref, start_ref, end_ref, result_ref, *, sizes, transposed):
    """Some columns of the products of one block of rows."""
    block, inner, width = sizes
    column, number = pl.program_id(0), pl.program_id(1)
    group, start, end = group_ref[number], start_ref[number], end_ref[number]
    rows, columns = pl.ds(start, block), pl.ds(column * width, width)

    def step(place, found):
        there = pl.ds(place * inner, inner)
        weight = weights_ref[group, columns, there].T if transposed else weights_ref[group, there, columns]
        return found + dot(x_ref[rows, there], weight)

    steps = jax.lax.select(start < end, jnp.int32(x_ref.shape[1] // inner), jnp.int32(0))
    found = jax.lax.fori_loop(0, steps, step, jnp.zeros((block, width), jnp.float32))
    inside = (start + jnp.arange(block) < end)[:, None]
    triton.store(result_ref.at[rows, columns], found, mask=jnp.broadcast_to(inside, found.shape))


@functools.partial(jax.jit, static_argnames="interpret")
def outer_products(x: jax.Array, y: jax.Array, sizes: jax.Array, *, interpret: bool = False) -> jax.Array:
    """[E, K, N] in the operands' dtype, the sum of x [M, K] times y [M, N] over each group's rows.

    Args:
        interpret: run the kernel in Pallas' interpreter, on any device.
    """
    (rows, height), columns = x.shape, y.shape[1]
    block = min(block_rows(rows, len(sizes)), INNER_BYTES // x.dtype.itemsize)
    tall, wide = _fitting(height, COLUMNS), _fitting(columns, COLUMNS)
    x, y = _padded(x, block, tall), _padded(y, block, wide)
    ends = jnp.cumsum(sizes)
    found = pl.pallas_call(
        functools.partial(_outer_products_kernel, block=block),
        grid=(y.shape[1] // wide, x.shape[1] // tall, len(sizes)),
        in_specs=[
            pl.BlockSpec((len(x), tall), lambda column, row, _: (0, row)),
            pl.BlockSpec((len(y), wide), lambda column, row, _: (0, column)),
            pl.BlockSpec(),  # all of them
            pl.BlockSpec(),
        ],
        out_specs=pl.BlockSpec((None, tall, wide), lambda column, row, group: (group, row, column)),
        out_shape=jax.ShapeDtypeStruct((len(sizes), x.shape[1], y.shape[1]), x.dtype),
        name="grouped_outer_products",
        **_options(tall, interpret),
    )(x, y, ends - sizes, ends)
    return found[:, :height, :columns]


def _outer_products_kernel(x_ref, y_ref, starts_ref, ends_ref, result_ref, *, block):
    """A part of the outer products of one group, summed over its rows."""
    group = pl.program_id(2)
    start, end = starts_ref[group], ends_ref[group]

    def step(place, found):
        first = start + place * block
        inside = (first + jnp.arange(block) < end)[:, None]
        of_x, of_y = (
            triton.load(ref.at[pl.ds(first, block), :], mask=jnp.broadcast_to(inside, (block, ref.shape[1])), other=0.0)
            for ref in (x_ref, y_ref)
        )
        return found + dot(of_x.T, of_y)

    found = jax.lax.fori_loop(0, pl.cdiv(end - start, block), step, jnp.zeros(result_ref.shape, jnp.float32))
    result_ref[...] = found.astype(result_ref.dtype)


def _fitting(size: int, most: int) -> int:
    """A power of two from 16 to `most`: the smallest that holds `size`, if one does."""
    return min(max(1 << (size - 1).bit_length(), 16), most)


def _padded(x: jax.Array, block: int, multiple: int) -> jax.Array:
    """A block of rows more, so that one may begin at the last row, and columns up to a multiple."""
    return jnp.pad(x, ((0, block), (0, -x.shape[1] % multiple)))


def _padded_columns(x: jax.Array, first: int, multiples: tuple[int, ...]) -> jax.Array:
    """The dimensions from `first` on up to multiples."""
    missing = [(0, -size % multiple) for size, multiple in zip(x.shape[first:], multiples, strict=True)]
    return jnp.pad(x, ((0, 0),) * first + tuple(missing))


def _options(block: int, interpret: bool) -> dict[str, Any]:
    warps = 4 if block < 128 else 8
    return {"compiler_params": triton.CompilerParams(num_warps=warps, num_stages=3), "interpret": interpret}
