"""Device: how each array is sharded over the mesh. One rule per logical axis; no silent replication."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dapo_jax.errors import InputError, divisors, nearest
from dapo_jax.parallel.mesh import BATCH_AXES, EXPERT_AXES, num_batch_shards
from dapo_jax.parallel.ordered_sums import rows_of
from dapo_jax.parallel.processes import waiting

Rules = Mapping[str, tuple[str, ...]]  # of each logical axis, the mesh axes that divide it, where the mesh has them

TRAIN_RULES: Rules = {
    "vocab": ("tensor",),
    "embed": ("fsdp", "expert", "context"),
    "expert_embed": ("fsdp", "context"),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "head_dim": (),
    "mlp": ("tensor",),
    "expert": EXPERT_AXES,
    "expert_mlp": (),
    "channels": (),  # queries, keys and values after each other in one leaf: even parts of it would cut no whole heads
    "router": (),
    "norm": (),
    "rank": (),
    "layers": (),
}
# For decoding, weights are split over tensor only, and those of experts over expert: every shard of the rows has a
# whole copy of the others.
DECODE_RULES: Rules = {**TRAIN_RULES, "embed": (), "expert_embed": ()}


class LogicalWeight(Protocol):
    """What sharding needs to know about a weight."""

    @property
    def path(self) -> tuple[str, ...]: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def axes(self) -> tuple[str, ...]: ...


def weight_sharding(weight: LogicalWeight, mesh: Mesh, rules: Rules) -> NamedSharding:
    """The sharding of one weight under `rules`."""
    return NamedSharding(mesh, _spec(weight.axes, rules, mesh.axis_names))


def _spec(axes: Sequence[str], rules: Rules, names: Sequence[str]) -> PartitionSpec:
    """The sharding of an array with these logical axes, over a mesh with these names of axes."""
    return _within(_logical(axes, rules), names)


def _logical(axes: Sequence[str], rules: Rules) -> PartitionSpec:
    return PartitionSpec(*(rules[axis] for axis in axes))


def _within(spec: PartitionSpec, names: Sequence[str]) -> PartitionSpec:
    """`spec` without mesh axes that are not among `names`."""

    def left(axes: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        given = axes if isinstance(axes, tuple) else (axes,)
        found = tuple(name for name in given if name is not None and name in names)
        return None if not found else found[0] if len(found) == 1 else found

    return PartitionSpec(*map(left, spec))


def on_mesh(specs: Any) -> Any:
    """Inside jit: `specs` without axes that the mesh of `jax.set_mesh` lacks, as a shard_map takes them."""
    names = jax.sharding.get_abstract_mesh().axis_names
    return jax.tree.map(lambda spec: _within(spec, names), specs, is_leaf=lambda x: isinstance(x, PartitionSpec))


def place_weight(mesh: Mesh, rules: Rules) -> Callable[[LogicalWeight, np.ndarray], jax.Array]:
    """A function that puts a host array, whole on every process, on the mesh with its weight's sharding."""

    def place(weight: LogicalWeight, array: np.ndarray) -> jax.Array:
        return put(array, weight_sharding(weight, mesh, rules))

    return place


class Indivisible(NamedTuple):
    """A dimension that its mesh axes do not divide."""

    axes: tuple[str, ...]  # of the mesh
    dimension: str  # such as "the embed dimension of layers.query, 48"
    common: int  # the largest divisor of all dimensions along the axes


def indivisible(table: Sequence[LogicalWeight], mesh_shape: Mapping[str, int], rules: Rules) -> list[Indivisible]:
    """The first of each kind of dimension that its mesh axes do not divide."""
    common: dict[tuple[str, ...], int] = {}
    found: dict[tuple[str, tuple[str, ...]], str] = {}
    for weight in table:
        for size, axis in zip(weight.shape, weight.axes, strict=True):
            axes = tuple(name for name in rules[axis] if name in mesh_shape)
            if not axes:
                continue
            common[axes] = math.gcd(common.get(axes, 0), size)
            if size % math.prod(mesh_shape[name] for name in axes):
                found.setdefault((axis, axes), f"the {axis} dimension of {'.'.join(weight.path)}, {size}")
    return [Indivisible(axes, dimension, common[axes]) for (_, axes), dimension in found.items()]


def indivisible_weights(table: Sequence[LogicalWeight], mesh_shape: Mapping[str, int], rules: Rules) -> list[str]:
    """One line per dimension that its mesh axes do not divide, with the fix."""
    lines = []
    for axes, dimension, common in indivisible(table, mesh_shape, rules):
        *others, last = (mesh_shape[axis] for axis in axes)
        fitting = [one for one in divisors(common) if common % (one * math.prod(others)) == 0]
        names = " x ".join(f"mesh.{axis}={mesh_shape[axis]}" for axis in axes)
        cure = f"set mesh.{axes[-1]}={nearest(fitting, last)}" if fitting else f"lower mesh.{axes[0]}"
        lines.append(f"{names} must divide {dimension}: {cure}")
    return lines


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The first dimension over the batch axes, the others whole."""
    return NamedSharding(mesh, _within(PartitionSpec(BATCH_AXES), mesh.axis_names))


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def constrain(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Inside jit: shards `x` by `spec` over the mesh of `jax.set_mesh`; does nothing without a mesh.

    Inside a shard_map, `x` is one shard along the mapped axes, and only the other axes divide it.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x

    left = [name for name in mesh.axis_names if name not in mesh.manual_axes]
    return jax.lax.with_sharding_constraint(x, _within(spec, left))


def shards_left() -> int:
    """Inside jit: the number of devices over which tokens are divided, without the mapped axes of a shard_map."""
    mesh, axes = jax.sharding.get_abstract_mesh(), (*BATCH_AXES, "context")
    return math.prod(size for axis, size in mesh.shape.items() if axis in axes and axis not in mesh.manual_axes)


def context_shards() -> int:
    """Inside jit: the number of devices over which the tokens of a sequence are divided."""
    return dict(jax.sharding.get_abstract_mesh().shape).get("context", 1)


def tensor_shards() -> int:
    """Inside jit: the number of devices over which the vocabulary, heads and matrices are divided."""
    return dict(jax.sharding.get_abstract_mesh().shape).get("tensor", 1)


def constrain_rows(x: jax.Array) -> jax.Array:
    """Inside jit: shards the rows of `x` [B, T, ...] over the batch axes, and its tokens over "context"."""
    return constrain(x, PartitionSpec(BATCH_AXES, "context"))


def constrain_residual(x: jax.Array) -> jax.Array:
    """Inside jit: shards the residual stream [B, T, D] between layers, rows as `constrain_rows` and D over tensor.

    This also divides what is saved for the backward pass. A D that "tensor" does not divide stays whole.
    """
    return constrain(x, PartitionSpec(BATCH_AXES, "context", "tensor" if x.shape[-1] % tensor_shards() == 0 else None))


def gather_input(x: jax.Array, dtype: Any) -> jax.Array:
    """Inside jit: the input [B, T, D] of several matrices that "tensor" divides, gathered once for all their products.

    Otherwise the gradient of each matrix gathers it again. It is rounded to `dtype`, that of the products, and sent so.
    The cotangents from the products are summed in its own dtype, and scattered once.
    """
    return x if tensor_shards() == 1 else _rounded_and_gathered(x, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _rounded_and_gathered(x: jax.Array, dtype: Any) -> jax.Array:
    return constrain_rows(x.astype(dtype)).astype(x.dtype)


_rounded_and_gathered.defvjp(
    lambda x, dtype: (_rounded_and_gathered(x, dtype), None),
    lambda dtype, _, cotangent: (constrain_residual(cotangent),),
)


def lookup(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Inside jit: rows [B, T, D] of `table` [V, D] for tokens [B, T], on the devices of the tokens' rows.

    Each device along "tensor" looks up the tokens in its share of the vocabulary, and a sum combines them. So the
    gradient too is computed where the tokens lie; left to XLA, it would gather the cotangents along "context".
    """
    mesh = jax.sharding.get_abstract_mesh()
    if tensor_shards() == context_shards() == 1:
        return rows_of(constrain(table, PartitionSpec()), constrain_rows(tokens))
    axes = set(mesh.axis_names) - set(mesh.manual_axes)  # all: XLA aborts on CPUs where bfloat16 is summed over a part

    def of_share(share: jax.Array, tokens: jax.Array) -> jax.Array:
        place = tokens - jax.lax.axis_index("tensor") * share.shape[0]
        here = (place >= 0) & (place < share.shape[0])
        found = rows_of(share, jnp.where(here, place, 0))
        return jax.lax.psum(jnp.where(here[..., None], found, 0), "tensor")

    rows = _within(PartitionSpec(BATCH_AXES, "context"), [*axes])
    return jax.shard_map(
        of_share, in_specs=(PartitionSpec("tensor"), rows), out_specs=rows, axis_names=axes, check_vma=False
    )(table, tokens)


def move(tree: Any, mesh: Mesh) -> Any:
    """Copies arrays to other devices of the same processes: onto `mesh`, sharded along the same axes.

    Raises:
        InputError: a process lacks a part that one of its devices must hold.
    """

    def onto(array: jax.Array) -> jax.Array:
        assert isinstance(array.sharding, NamedSharding)
        sharding = NamedSharding(mesh, array.sharding.spec)
        there = {_extent(shard.index, array.shape): shard.data for shard in array.addressable_shards}
        wanted = sharding.addressable_devices_indices_map(array.shape)
        try:
            parts = [jax.device_put(there[_extent(index, array.shape)], device) for device, index in wanted.items()]
        except KeyError:
            raise InputError(
                f"process {jax.process_index()} trains on devices that lack some of the weights that it samples with: "
                "choose a mesh.tensor that divides the devices of a process, or 1"
            ) from None
        return jax.make_array_from_single_device_arrays(array.shape, sharding, parts)

    return jax.tree.map(onto, tree)


def _extent(index: Any, shape: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
    return tuple(part.indices(size) for part, size in zip(index, shape, strict=True))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def gather_weight(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Inside jit: gathers a weight over fsdp for a product; its gradient is scattered over fsdp again.

    Otherwise XLA may split the product instead, and hold one partial result per device in memory.

    Args:
        axes: logical axis of each dimension.
    """
    return constrain(x, _logical(axes, DECODE_RULES))


gather_weight.defvjp(
    lambda x, axes: (gather_weight(x, axes), None),
    lambda axes, _, gradient: (constrain(gradient, _logical(axes, TRAIN_RULES)),),
)


def put(tree: Any, sharding: NamedSharding) -> Any:
    """Host arrays, whole on every process, as device arrays with `sharding`."""

    def place(array: np.ndarray) -> jax.Array:
        array = np.asarray(array)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    return jax.tree.map(place, tree)


def put_rows(tree: Any, mesh: Mesh) -> Any:
    """Host arrays as device arrays over the batch axes, padded with zero rows to a multiple of the batch shards."""

    def pad(array: np.ndarray) -> np.ndarray:
        missing = -array.shape[0] % num_batch_shards(mesh)
        return np.pad(array, ((0, missing),) + ((0, 0),) * (array.ndim - 1))

    return put(jax.tree.map(pad, tree), batch_sharding(mesh))


def fetch(tree: Any) -> Any:
    """Device arrays as NumPy arrays, whole on every process: parts on other processes are gathered."""

    def whole(array: Any) -> Any:
        if isinstance(array, jax.Array) and not (array.is_fully_addressable or array.is_fully_replicated):
            return multihost_utils.process_allgather(array, tiled=True)
        return array

    with waiting():
        return jax.tree.map(np.asarray, jax.device_get(jax.tree.map(whole, tree)))
