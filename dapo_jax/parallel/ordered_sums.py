"""Device: sums by number, and gradients of taking rows by number, which a GPU adds up in the same order each time.

A scatter that adds has atomics on a GPU: they run in any order, and the sum's rounding differs between two runs. There
the rows are sorted by number and summed in blocks instead, by products with matrices of zeros and ones. Elsewhere a
scatter is ordered, and stays.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from dapo_jax.parallel.mesh import BATCH_AXES

BLOCK = 128  # rows that one product sums


def rows_of(table: jax.Array, places: jax.Array) -> jax.Array:
    """`table[places]`: [V, D] and [...] int32 -> [..., D]."""
    return _taken(lambda table, places: table[places], _sum_over_shards, table, places)


def rows_along(x: jax.Array, places: jax.Array) -> jax.Array:
    """Rows of each entry: [S, T, D] and [S, U] int32 -> [S, U, D]."""
    summed = jax.vmap(sum_rows, in_axes=(0, 0, None))
    return _taken(lambda x, places: jnp.take_along_axis(x, places[..., None], axis=1), summed, x, places)


def segment_sum(values: jax.Array, numbers: jax.Array, count: int) -> jax.Array:
    """`jax.ops.segment_sum` in float32: [T, ...] and [T] int32 -> [count, ...]."""

    def ordered(values: jax.Array, numbers: jax.Array) -> jax.Array:
        return sum_rows(values.reshape(len(values), -1), numbers, count).reshape(count, *values.shape[1:])

    def scattered(values: jax.Array, numbers: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(values, numbers, count)

    return jax.lax.platform_dependent(values, numbers, cuda=ordered, default=scattered)


def sum_rows(rows: jax.Array, places: jax.Array, size: int) -> jax.Array:
    """float32 sums [size, D] of `rows` [T, D] at each of the `places` [T] int32; those beyond `size` count nowhere.

    A row that counts must be finite: one that is not spoils the sums of its block. Others may hold anything.
    """
    order, missing = jnp.argsort(places, stable=True), -len(places) % BLOCK
    numbers = jnp.pad(places[order], (0, missing), constant_values=size)
    rows = rows.astype(jnp.float32).at[order].get(unique_indices=True)  # so that its gradient needs no sum
    rows = jnp.pad(rows, ((0, missing), (0, 0)))
    rows = jnp.where(((numbers >= 0) & (numbers < size))[:, None], rows, 0.0)  # 0 * NaN is NaN
    rows, blocks = rows.reshape(-1, BLOCK, rows.shape[-1]), numbers.reshape(-1, BLOCK)
    before = (blocks[:, :, None] == blocks[:, None, :]) & jnp.tri(BLOCK, dtype=bool)
    sums = _product("bij,bjd->bid", before, rows)  # of a number's rows so far, in this block
    earlier = (blocks[:, :1] == blocks[:, -1]) & jnp.tri(len(blocks), k=-1, dtype=bool)
    carried = _product("ab,bd->ad", earlier, sums[:, -1])  # of the block's first number, in earlier blocks
    sums = (sums + jnp.where((blocks == blocks[:, :1])[..., None], carried[:, None], 0.0)).reshape(len(numbers), -1)
    is_last = (numbers != jnp.append(numbers[1:], size)) & (numbers >= 0) & (numbers < size)
    places = jnp.where(is_last, numbers, size + jnp.arange(len(numbers)))  # the others are dropped
    # Added, not set: compilers then add to the other gradients of a table in place.
    return jnp.zeros((size, sums.shape[-1])).at[places].add(sums, mode="drop", unique_indices=True)


def _product(subscripts: str, ones: jax.Array, rows: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, ones.astype(jnp.float32), rows, precision="highest")


def _taken(
    take: Callable[[jax.Array, jax.Array], jax.Array], summed: Callable[..., jax.Array], x: jax.Array, places: jax.Array
) -> jax.Array:
    """`take(x, places)`, whose gradient on GPUs is `summed`: (cotangent, places, number of rows of x) -> like x."""
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)

    @jax.custom_vjp
    def taken(x: jax.Array, places: jax.Array) -> jax.Array:
        return take(x, places)

    def pull_back(places: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, None]:
        def scattered(cotangent: jax.Array, places: jax.Array) -> jax.Array:
            return jax.linear_transpose(lambda x: take(x, places), like)(cotangent)[0]

        def ordered(cotangent: jax.Array, places: jax.Array) -> jax.Array:
            return summed(cotangent, places, like.shape[-2]).astype(like.dtype)

        return jax.lax.platform_dependent(cotangent, places, cuda=ordered, default=scattered), None

    taken.defvjp(lambda x, places: (take(x, places), places), pull_back)
    return taken(x, places)


def _sum_over_shards(cotangent: jax.Array, places: jax.Array, size: int) -> jax.Array:
    """`sum_rows` of [B, T, D], of each shard of rows and tokens on its device, and then of the shards."""
    mesh = jax.sharding.get_abstract_mesh()
    rows, tokens = (
        tuple(axis for axis in names if mesh.shape.get(axis, 1) > 1 and axis not in mesh.manual_axes)
        for names in (BATCH_AXES, ("context",))
    )

    def local(cotangent: jax.Array, places: jax.Array) -> jax.Array:
        return sum_rows(cotangent.reshape(-1, cotangent.shape[-1]), places.reshape(-1), size)

    if not rows + tokens:
        return local(cotangent, places)
    names = set(mesh.axis_names) - set(mesh.manual_axes)
    spec, parts = PartitionSpec(rows, tokens) if tokens else PartitionSpec(rows), PartitionSpec(rows + tokens)
    of_shards = jax.shard_map(
        lambda *given: local(*given)[None], in_specs=(spec, spec), out_specs=parts, axis_names=names, check_vma=False
    )
    return jnp.sum(of_shards(cotangent, places), axis=0)
