"""Device: checksums of arrays, whatever their sharding; copies of an array on several devices are compared.

A checksum is two sums modulo 2^32. Each element adds its bits, mixed with its place in the whole array by a bijection
of 32 bits (the finalizer of MurmurHash3). So one element that differs always changes both sums, and any other damage
escapes both with a probability of about 2^-64.
"""

import functools
import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dapo_jax.parallel.processes import SharedFailure
from dapo_jax.parallel.sharding import fetch

FACTORS = 0x9E3779B1, 0x85EBCA77  # one for each sum: odd, so that places differ in it


def checksums(tree: Any) -> dict[str, str]:
    """The checksum of each array of `tree`, 16 hexadecimal digits, by its path, such as actor.params.embedding.

    Every process must call it. The arrays lie on one mesh, which divides them evenly, or all on one device.

    Raises:
        SharedFailure: copies of an array on several devices differ.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    if not leaves:
        return {}
    arrays = [array for _, array in leaves]
    shardings = tuple(map(_named, arrays))
    mesh = shardings[0].mesh
    assert isinstance(mesh, Mesh)
    with jax.set_mesh(mesh):
        parts = fetch(sums_of_shards(arrays, shardings)).reshape(*mesh.devices.shape, len(arrays), 2)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
    return {
        name: _total(name, parts[..., number, :], mesh, sharding.spec)
        for number, (name, sharding) in enumerate(zip(names, shardings, strict=True))
    }


def digest(tree: Any) -> str:
    """One checksum of all arrays of `tree` with their paths; see `checksums`."""
    return hashlib.sha256(json.dumps(checksums(tree), sort_keys=True).encode()).hexdigest()


@functools.partial(jax.jit, static_argnums=1)
def sums_of_shards(arrays: list[jax.Array], shardings: tuple[NamedSharding, ...]) -> jax.Array:
    """The two sums [devices of the mesh, arrays, 2] uint32 of each array's shard on each device.

    Shards are read where they lie, without a copy; those in the host's memory come to the device one after the other.
    """
    mesh, shapes = shardings[0].mesh, [array.shape for array in arrays]
    arrays = [
        jax.device_put(array, sharding.with_memory_kind("device")) if sharding.memory_kind == "pinned_host" else array
        for array, sharding in zip(arrays, shardings, strict=True)
    ]
    specs = [sharding.spec for sharding in shardings]

    def of_device(shards: list[jax.Array]) -> jax.Array:
        return jnp.stack([_sums(*one) for one in zip(shards, shapes, specs, strict=True)])[None]

    return jax.shard_map(
        of_device, mesh=mesh, in_specs=(specs,), out_specs=PartitionSpec(mesh.axis_names), check_vma=False
    )(arrays)


def _sums(shard: jax.Array, shape: Sequence[int], spec: PartitionSpec) -> jax.Array:
    """The two sums [2] of a shard of an array of this shape and sharding."""
    place = jnp.zeros(shard.shape, jnp.uint32)
    for dimension, axes in zip(range(shard.ndim), (*spec, *[None] * shard.ndim), strict=False):
        start = 0 if axes is None else lax.axis_index(axes) * shard.shape[dimension]
        along = lax.broadcasted_iota(jnp.uint32, shard.shape, dimension) + jnp.uint32(start)
        place += along * jnp.uint32(math.prod(shape[dimension + 1 :]) % 2**32)
    bits = shard if shard.dtype == bool else lax.bitcast_convert_type(shard, f"uint{8 * shard.dtype.itemsize}")
    bits = bits.astype(jnp.uint32)
    mixed = tuple(_mixed(bits ^ (place * jnp.uint32(factor))) for factor in FACTORS)

    def add(left, right):
        return tuple(map(lax.add, left, right))

    # one reduction of both, which compilers fuse with what it reads
    return jnp.stack(lax.reduce(mixed, (jnp.uint32(0),) * 2, add, tuple(range(shard.ndim))))


def _mixed(x: jax.Array) -> jax.Array:
    """A bijection of 32 bits in which each bit of `x` changes about half of the bits (MurmurHash3's finalizer)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _named(array: jax.Array) -> NamedSharding:
    """The sharding of `array` over a mesh; one of a single device if it lies on that alone."""
    if isinstance(array.sharding, NamedSharding):
        return array.sharding
    (device,) = array.sharding.device_set
    return NamedSharding(Mesh(np.array([device]), ("data",)), PartitionSpec())


def _total(name: str, parts: np.ndarray, mesh: Mesh, spec: PartitionSpec) -> str:
    """The checksum of an array from the sums of its shards, [*mesh, 2] uint32."""
    divided = {axis for axes in spec if axes is not None for axis in (axes if isinstance(axes, tuple) else (axes,))}
    first = parts[tuple(slice(None) if axis in divided else slice(1) for axis in mesh.axis_names)]
    if (differs := (parts != first).any(axis=-1)).any():
        devices = ", ".join(str(device) for device in mesh.devices[differs][:8])
        raise SharedFailure(
            f"the copies of {name} must be equal on all devices, but those on {devices} differ from those on the first "
            "ones: a device computes wrong numbers or its memory is damaged. Nothing was saved: leave out the machine "
            "at fault (test each of the devices) and rerun the same command to resume from the newest checkpoint"
        )
    high, low = first.reshape(-1, 2).sum(axis=0, dtype=np.uint64) % 2**32
    return f"{high:08x}{low:08x}"
