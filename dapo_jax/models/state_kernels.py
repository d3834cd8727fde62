"""Device: a token's change of the states of linear attention in one kernel, on GPUs, TPUs or in Pallas' interpreter.

A program has whole columns of a state, so that it reads them once and writes them once, in place: 2 sizes of the states
for a token, where XLA takes 3 to 3.5. Sizes as in gated_delta.py.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.sharding import Mesh, PartitionSpec

from dapo_jax.models.architecture import Delta
from dapo_jax.models.gated_delta import UpdateStates, update_states
from dapo_jax.parallel.devices import compiles_triton
from dapo_jax.parallel.mesh import BATCH_AXES, platform
from dapo_jax.parallel.sharding import on_mesh

COLUMNS = 64  # of a program on a GPU
HEADS = 8  # of a program on a TPU; or all
SPEC = PartitionSpec(BATCH_AXES, "tensor")


def update_for(mesh: Mesh, delta: Delta) -> UpdateStates:
    """How a token changes states on these devices: by a kernel, or by `update_states` where none fits."""
    device, sizes = mesh.devices.flat[0], (delta.key_dim, delta.value_dim)
    if platform(mesh) == "tpu" and all(size % 128 == 0 for size in sizes):
        return update_on_tpu
    powers = all(size >= 16 and size.bit_count() == 1 for size in sizes)
    return update_on_gpu if platform(mesh) == "gpu" and compiles_triton(device) and powers else update_states


def update_on_gpu(*arrays: jax.Array, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """As `update_states`, in Triton; I and J are powers of two from 16 on."""
    return _on_shards(functools.partial(_by_columns, interpret=interpret), arrays)


def update_on_tpu(*arrays: jax.Array, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """As `update_states`, in Mosaic; I and J are multiples of 128."""
    return _on_shards(functools.partial(_by_heads, interpret=interpret), arrays)


def _on_shards(update: Callable[..., Any], arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    spec = on_mesh(SPEC)
    return jax.shard_map(update, in_specs=(spec,) * 6, out_specs=(spec, spec), check_vma=False)(*arrays)


def _by_columns(state: jax.Array, *vectors: jax.Array, interpret: bool) -> tuple[jax.Array, jax.Array]:
    rows, heads, inner, columns = state.shape
    block = min(COLUMNS, columns)
    of_state = pl.BlockSpec((None, None, inner, block), lambda row, head, part: (row, head, 0, part))
    of_key = pl.BlockSpec((None, None, inner), lambda row, head, part: (row, head, 0))
    of_value = pl.BlockSpec((None, None, block), lambda row, head, part: (row, head, part))
    of_head = pl.BlockSpec((None, None), lambda row, head, part: (row, head))

    def kernel(state, query, key, value, kept, beta, read, new):
        changed = _changed(state[...], query[...][:, None], key[...][:, None], value[...], kept[...], beta[...])
        read[...], new[...] = changed

    return _call(
        kernel,
        (rows, heads, columns // block),
        [of_state, of_key, of_key, of_value, of_head, of_head],
        [of_value, of_state],
        (state, *vectors),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
    )


def _by_heads(state: jax.Array, *vectors: jax.Array, interpret: bool) -> tuple[jax.Array, jax.Array]:
    rows, heads, inner, columns = state.shape
    block = HEADS if heads % HEADS == 0 else heads
    query, key, value, *shares = vectors
    kept, beta = (jnp.broadcast_to(x[..., None], value.shape) for x in shares)
    of_state = pl.BlockSpec((None, block, inner, columns), lambda row, part: (row, part, 0, 0))
    of_key, of_value = (
        pl.BlockSpec((None, block, size), lambda row, part: (row, part, 0)) for size in (inner, columns)
    )

    def kernel(state, query, key, value, kept, beta, read, new):
        queries, keys = query[...].T, key[...].T
        for head in range(block):
            here = slice(head, head + 1)
            vectors = queries[:, here], keys[:, here], value[here], kept[here], beta[here]
            read[here], new[head] = _changed(state[head], *vectors)

    specs = [of_state, of_key, of_key, *[of_value] * 3], [of_value, of_state]
    arrays = state, query, key, value, kept, beta
    return _call(kernel, (rows, heads // block), *specs, arrays, interpret=interpret)


def _changed(
    state: jax.Array, query: jax.Array, key: jax.Array, value: jax.Array, kept: jax.Array, beta: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """What is read, and the state [I, j], of columns [j] or [1, j] of values, and of queries and keys [I, 1]."""
    at_key, at_query = (jnp.sum(state * x, axis=0, keepdims=value.ndim == 2) for x in (key, query))
    change = beta * (value - kept * at_key)
    return kept * at_query + jnp.sum(key * query) * change, kept * state + key * change


def _call(
    kernel: Callable[..., None],
    grid: tuple[int, ...],
    in_specs: list[pl.BlockSpec],
    out_specs: list[pl.BlockSpec],
    arrays: tuple[jax.Array, ...],
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """`kernel`, which writes the states in place of those it is given."""
    state, _, _, value, *_ = arrays
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (value, state)],
        input_output_aliases={0: 1},
        name="update_states",
        **options,
    )(*arrays)
