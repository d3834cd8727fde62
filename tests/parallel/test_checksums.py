"""A checksum changes with any bit, and with nothing else; copies on several devices must be equal."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from shapes import mesh_of

from dapo_jax.parallel.checksums import FACTORS, checksums
from dapo_jax.parallel.processes import SharedFailure

WHOLE = {
    "float32": np.random.default_rng(0).normal(size=(3, 4, 8)).astype(np.float32),
    "bfloat16": np.asarray(jnp.linspace(-1, 1, 64, dtype=jnp.bfloat16).reshape(8, 8)),
    "int32": np.arange(-5, 11, dtype=np.int32),
    "bool": np.arange(16) % 3 == 0,
    "scalar": np.float32(2.5),
}
SPECS = {"float32": (None, "tensor", ("data", "fsdp")), "bfloat16": ("fsdp",), "int32": ("data",)}


def on_mesh(tree, shape):
    mesh = mesh_of(shape)
    return {
        name: jax.device_put(value, NamedSharding(mesh, PartitionSpec(*SPECS.get(name, ()))))
        for name, value in tree.items()
    }


def by_numpy(array):
    """The checksum as the docstring of the module defines it."""
    array = np.atleast_1d(array)
    bits = array.astype(np.uint32) if array.dtype == bool else array.view(f"u{array.itemsize}").astype(np.uint32)
    place, sums = np.arange(array.size, dtype=np.uint32).reshape(array.shape), []
    for factor in FACTORS:
        x = bits ^ (place * np.uint32(factor))
        for shift, factor_of_mix in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor_of_mix)
        sums.append(int((x ^ (x >> np.uint32(16))).sum(dtype=np.uint32)))
    return "".join(f"{total:08x}" for total in sums)


@pytest.fixture(scope="module")
def whole():
    return checksums(on_mesh(WHOLE, (2, 2, 2)))


def test_no_sharding_changes_a_checksum(whole):
    assert whole == {name: by_numpy(value) for name, value in WHOLE.items()}
    assert whole == checksums(on_mesh(WHOLE, (8, 1, 1))) == checksums(jax.tree.map(jnp.asarray, WHOLE))
    moved = np.roll(WHOLE["float32"], 1, axis=2)
    assert checksums({"float32": jnp.asarray(moved)})["float32"] != whole["float32"]
    assert checksums({}) == {}


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int32", "scalar"])
def test_every_bit_of_every_element_counts(name, whole):
    seen, array = {whole[name]}, np.atleast_1d(WHOLE[name])
    for bit in range(8 * array.itemsize):
        damaged = array.copy()
        damaged.reshape(-1).view(f"u{array.itemsize}")[bit % array.size] ^= 1 << bit
        seen.add(checksums(on_mesh({name: damaged.reshape(WHOLE[name].shape)}, (2, 2, 2)))[name])
    assert len(seen) == 1 + 8 * array.itemsize


def test_copies_that_differ_are_named_with_their_devices():
    mesh = mesh_of((2, 2, 2))
    sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
    parts = [np.ones(4, np.float32) for _ in range(8)]
    parts[5][2] = 1 + 2**-23
    devices = list(mesh.devices.flat)
    arrays = [jax.device_put(part, device) for part, device in zip(parts, devices, strict=True)]
    array = jax.make_array_from_single_device_arrays((8,), sharding, arrays)
    with pytest.raises(SharedFailure, match=rf"copies of actor.w must be equal .* on {devices[5]} differ from those"):
        checksums({"actor": {"w": array}})
