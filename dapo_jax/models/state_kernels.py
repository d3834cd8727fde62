"""Device: a token's change of the states of linear attention in one kernel, on GPUs, TPUs or in Pallas' interpreter.

States lie at places of a pool, each shard's own, as pages do. The kernel reads that of a row once, at one place, and
writes it once, at the same or another place: 2 sizes of the states for a token, where XLA takes 3 to 3.5 and copies
rows that move. Sizes as in gated_delta.py, for b rows; S places.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton
from jax.sharding import Mesh, PartitionSpec

from dapo_jax.models.architecture import Delta
from dapo_jax.parallel.devices import is_before_ampere
from dapo_jax.parallel.mesh import BATCH_AXES, platform
from dapo_jax.parallel.sharding import on_mesh

COLUMNS = 64  # of a program on a GPU
HEADS_AT_ONCE = 8  # in a program on a TPU; or all
ROWS, ROW_HEADS = PartitionSpec(BATCH_AXES), PartitionSpec(BATCH_AXES, "tensor")
# (reads [b], writes [b], pool [S, V, I, J], then as `gated_delta.update_states`) -> (what is read [b, V, J], pool).
# No row reads what another one writes.
UpdatePlaces = Callable[..., tuple[jax.Array, jax.Array]]


def state_kernel(mesh: Mesh, delta: Delta | None) -> UpdatePlaces | None:
    """The kernel for these devices; None without linear attention, or where none fits."""
    if delta is None:
        return None
    device, sizes = mesh.devices.flat[0], (delta.key_dim, delta.value_dim)
    if platform(mesh) == "tpu":
        return update_on_tpu if all(size % 128 == 0 for size in sizes) else None
    powers = all(size >= 16 and size.bit_count() == 1 for size in sizes)
    return update_on_gpu if platform(mesh) == "gpu" and powers and not is_before_ampere(device) else None


def fits_all(delta: Delta) -> bool:
    """Whether the kernels of GPUs and TPUs both take such states."""
    return all(size % 128 == 0 and size.bit_count() == 1 for size in (delta.key_dim, delta.value_dim))


def update_on_gpu(*arrays: jax.Array, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """An `UpdatePlaces` in Triton; I and J are powers of two from 16 on."""
    return _on_shards(functools.partial(_by_columns, interpret=interpret), arrays)


def update_on_tpu(*arrays: jax.Array, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """An `UpdatePlaces` in Mosaic; I and J are multiples of 128."""
    return _on_shards(functools.partial(_by_heads, interpret=interpret), arrays)


def _on_shards(update: Callable[..., Any], arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    rows, heads = on_mesh((ROWS, ROW_HEADS))
    specs = rows, rows, *[heads] * 6
    return jax.shard_map(update, in_specs=specs, out_specs=(heads, heads), check_vma=False)(*arrays)


def _by_columns(*arrays: jax.Array, interpret: bool) -> tuple[jax.Array, jax.Array]:
    _, _, pool, _, _, value, *_ = arrays
    rows, heads, columns = value.shape
    block = min(COLUMNS, columns)

    def kernel(reads, writes, old, query, key, value, kept, beta, read, new):
        row, head, part = (pl.program_id(axis) for axis in range(3))
        there = pl.ds(part * block, block)
        vectors = query[row, head][:, None], key[row, head][:, None], value[row, head, there]
        changed = _changed(old[reads[row], head, :, there], *vectors, kept[row, head], beta[row, head])
        read[row, head, there], new[writes[row], head, :, there] = changed

    return pl.pallas_call(
        kernel,
        grid=(rows, heads, columns // block),
        out_shape=_results(value, pool),
        input_output_aliases={2: 1},
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="update_states",
    )(*arrays)


def _by_heads(
    reads: jax.Array, writes: jax.Array, pool: jax.Array, *vectors: jax.Array, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    query, key, value, *shares = vectors
    kept, beta = (jnp.broadcast_to(x[..., None], value.shape) for x in shares)
    (rows, heads, columns), inner = value.shape, pool.shape[2]
    block = HEADS_AT_ONCE if heads % HEADS_AT_ONCE == 0 else heads

    def of_rows(size: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, block, size), lambda row, part, *_: (row, part, 0))

    def of_states(place: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, block, inner, columns), lambda row, part, *places: (places[place][row], part, 0, 0))

    def kernel(_reads, _writes, old, query, key, value, kept, beta, read, new):
        queries, keys = query[...].T, key[...].T
        for head in range(block):
            here = slice(head, head + 1)
            of_head = queries[:, here], keys[:, here], value[here], kept[here], beta[here]
            read[here], new[head] = _changed(old[head], *of_head)

    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(rows, heads // block),
            in_specs=[of_states(0), of_rows(inner), of_rows(inner), *[of_rows(columns)] * 3],
            out_specs=[of_rows(columns), of_states(1)],
        ),
        out_shape=_results(value, pool),
        input_output_aliases={2: 1},
        interpret=interpret,
        name="update_states",
    )(reads, writes, pool, query, key, value, kept, beta)


def _changed(
    state: jax.Array, query: jax.Array, key: jax.Array, value: jax.Array, kept: jax.Array, beta: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """What is read, and the state [I, j], of columns [j] or [1, j] of values, and of queries and keys [I, 1]."""
    at_key, at_query = (jnp.sum(state * x, axis=0, keepdims=value.ndim == 2) for x in (key, query))
    change = beta * (value - kept * at_key)
    return kept * at_query + jnp.sum(key * query) * change, kept * state + key * change


def _results(*arrays: jax.Array) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
