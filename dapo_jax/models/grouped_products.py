"""Device: products of sorted rows with the weights of their groups, such as of tokens with those of their experts.

Operands are in the dtype of the weights, results are float32, in the backward pass too. Each group's weights are
multiplied by its own rows alone: by Triton kernels on GPUs, Mosaic kernels on TPUs and a loop over blocks of rows
elsewhere. XLA's own `ragged_dot` multiplies every group's weights by all rows on CPUs and GPUs, and on TPUs for the
weights' gradients.

Sizes: M rows, E groups, K columns of a row, N of a result.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from dapo_jax.models import grouped_products_gpu as gpu
from dapo_jax.models import grouped_products_tpu as tpu
from dapo_jax.models.attention import dot
from dapo_jax.models.row_blocks import RowBlocks, block_rows, row_blocks


@jax.custom_vjp
def grouped_product(x: jax.Array, weights: jax.Array, sizes: jax.Array) -> Any:
    """[M, N] float32: each row of x [M, K] times its group's weights [K, N]; zeros after the last group.

    Args:
        weights: [E, K, N], bfloat16 or float32.
        sizes: [E] int32, rows of each group; the groups are next to each other from row 0 on.
    """
    return _products(x.astype(weights.dtype), weights, sizes)


def _forward(x: jax.Array, weights: jax.Array, sizes: jax.Array) -> tuple[jax.Array, Any]:
    rounded = x.astype(weights.dtype)
    return _products(rounded, weights, sizes), (rounded, weights, sizes, jnp.zeros((), x.dtype))


def _backward(saved: Any, cotangent: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, weights, sizes, x_like = saved
    cotangent = cotangent.astype(weights.dtype)
    to_x = _products(cotangent, weights, sizes, transposed=True)
    return to_x.astype(x_like.dtype), _outer_products(x, cotangent, sizes), None


grouped_product.defvjp(_forward, _backward)


def _products(x: jax.Array, weights: jax.Array, sizes: jax.Array, *, transposed: bool = False) -> jax.Array:
    """[M, N] float32 of x [M, K] and weights [E, K, N], or [E, N, K] if `transposed`, of one dtype."""
    of_platform = {"cuda": gpu.products, "tpu": tpu.products, "default": products}
    kernels = {name: functools.partial(kernel, transposed=transposed) for name, kernel in of_platform.items()}
    return jax.lax.platform_dependent(x, weights, sizes, **kernels)


def _outer_products(x: jax.Array, y: jax.Array, sizes: jax.Array) -> jax.Array:
    """[E, K, N] in the operands' dtype: the sum of x [M, K] times y [M, N] over each group's rows."""
    return jax.lax.platform_dependent(
        x, y, sizes, cuda=gpu.outer_products, tpu=tpu.outer_products, default=outer_products
    )


def products(x: jax.Array, weights: jax.Array, sizes: jax.Array, *, transposed: bool) -> jax.Array:
    """A loop over blocks of rows: the arguments and the result of `_products`."""
    block, x, blocks = _in_blocks(x, sizes)

    def step(results: jax.Array, one: RowBlocks) -> tuple[jax.Array, None]:
        weight = weights[one.group].T if transposed else weights[one.group]
        found = dot(_rows(x, one, block), weight)
        found = jnp.where(_inside(one, block), found, _rows(results, one, block))
        return jax.lax.dynamic_update_slice_in_dim(results, found, one.start, 0), None

    width = weights.shape[1 if transposed else 2]
    results, _ = jax.lax.scan(step, jnp.zeros((len(x), width), jnp.float32), blocks)
    return results[:-block]


def outer_products(x: jax.Array, y: jax.Array, sizes: jax.Array) -> jax.Array:
    """A loop over blocks of rows: the arguments and the result of `_outer_products`."""
    block, x, blocks = _in_blocks(x, sizes)
    y = jnp.pad(y, ((0, block), (0, 0)))

    def step(results: jax.Array, one: RowBlocks) -> tuple[jax.Array, None]:
        of_x, of_y = (jnp.where(_inside(one, block), _rows(z, one, block), 0) for z in (x, y))
        return results.at[one.group].add(dot(of_x.T, of_y)), None

    results, _ = jax.lax.scan(step, jnp.zeros((len(sizes), x.shape[1], y.shape[1]), jnp.float32), blocks)
    return results.astype(x.dtype)


def _in_blocks(x: jax.Array, sizes: jax.Array) -> tuple[int, jax.Array, RowBlocks]:
    """The rows of a block, x with as many rows more so that a block may begin at its last row, and the blocks."""
    block = block_rows(len(x), len(sizes))
    return block, jnp.pad(x, ((0, block), (0, 0))), row_blocks(sizes, len(x), block)


def _rows(x: jax.Array, one: RowBlocks, block: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, one.start, block)


def _inside(one: RowBlocks, block: int) -> jax.Array:
    """[block, 1] bool: the rows that belong to the block's group."""
    return (one.start + jnp.arange(block) < one.end)[:, None]
