"""Device: the mesh ("data", "fsdp", "tensor") that every function of a run is sharded over."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

AXES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")  # rows of prompts, responses and training batches


def make_mesh(data: int, fsdp: int, tensor: int, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh over all devices, or over those given. `data=-1` takes what the other axes leave.

    Raises ValueError if the product of the axes is not the number of devices.
    """
    count = jax.device_count() if devices is None else len(devices)
    if data == -1:
        data = count // (fsdp * tensor)
    if data * fsdp * tensor != count:
        raise ValueError(
            f"mesh.data={data} x mesh.fsdp={fsdp} x mesh.tensor={tensor} must be the number of devices, "
            f"{count}: change one of them, or set mesh.data=-1"
        )
    return jax.make_mesh((data, fsdp, tensor), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def num_batch_shards(mesh: Mesh) -> int:
    """Over how many devices rows are divided."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def platform(mesh: Mesh) -> str:
    """What the devices are: cpu, gpu or tpu. They need not be this machine's."""
    return mesh.devices.flat[0].platform
