"""Device: grouped products in JAX's Mosaic kernels (megablox), on TPUs or in Pallas' interpreter.

A tile of rows that several groups share is multiplied by the weights of each. Sizes as in grouped_products.py.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

from dapo_jax.models.row_blocks import block_rows, in_groups

LANES = 128
WEIGHT_BYTES = 2**21  # of the tile of weights in a core's memory
OUTER = 512  # columns of both operands in a tile of outer products


def products(
    x: jax.Array, weights: jax.Array, sizes: jax.Array, *, transposed: bool, interpret: bool = False
) -> jax.Array:
    """[M, N] float32 of x [M, K] and weights [E, K, N], or [E, N, K] if `transposed`.

    Args:
        interpret: run the kernel in Pallas' interpreter, on any device.
    """
    (rows, inner), columns = x.shape, weights.shape[1 if transposed else 2]
    block = block_rows(rows, len(sizes))
    # With all inner columns in the tile, a group's weights stay in the core's memory from one tile of rows to the next.
    tall = _fitting(inner, 16 * LANES)
    wide = _fitting(columns, WEIGHT_BYTES // (tall * x.dtype.itemsize))
    with _exact(x.dtype):
        found = gmm(
            _whole_blocks(x, block),
            weights,
            sizes,
            preferred_element_type=jnp.dtype(jnp.float32),
            tiling=(block, tall, wide),
            transpose_rhs=transposed,
            interpret=interpret,
        )
    return in_groups(found[:rows], sizes)


def outer_products(x: jax.Array, y: jax.Array, sizes: jax.Array, *, interpret: bool = False) -> jax.Array:
    """[E, K, N] in the operands' dtype, the sum of x [M, K] times y [M, N] over each group's rows.

    Args:
        interpret: run the kernel in Pallas' interpreter, on any device.
    """
    block = block_rows(len(x), len(sizes))
    with _exact(x.dtype):
        return tgmm(
            _whole_blocks(x, block).T,
            _whole_blocks(y, block),
            sizes,
            preferred_element_type=x.dtype,
            tiling=(block, _fitting(x.shape[1], OUTER), _fitting(y.shape[1], OUTER)),
            interpret=interpret,
        )


def _fitting(size: int, most: int) -> int:
    """Columns of a tile: all, or a multiple of LANES up to `most`."""
    return size if size <= most else max(most // LANES, 1) * LANES


def _whole_blocks(x: jax.Array, block: int) -> jax.Array:
    return jnp.pad(x, ((0, -len(x) % block), (0, 0)))


def _exact(dtype: Any) -> AbstractContextManager[Any]:
    """Products of float32 arrays are not rounded to bfloat16."""
    return jax.default_matmul_precision("highest") if dtype == jnp.float32 else nullcontext()
