"""Device: the mesh ("data", "fsdp", "tensor") that every function of a run is sharded over."""

import jax
from jax.sharding import AxisType, Mesh

AXES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")  # rows of prompts, responses and training batches


def make_mesh(data: int, fsdp: int, tensor: int) -> Mesh:
    """A mesh over all devices. `data=-1` takes what the other axes leave.

    Raises ValueError if the product of the axes is not the number of devices.
    """
    devices = jax.device_count()
    if data == -1:
        data = devices // (fsdp * tensor)
    if data * fsdp * tensor != devices:
        raise ValueError(
            f"mesh.data={data} x mesh.fsdp={fsdp} x mesh.tensor={tensor} must be the number of devices, "
            f"{devices}: change one of them, or set mesh.data=-1"
        )
    return jax.make_mesh((data, fsdp, tensor), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def num_batch_shards(mesh: Mesh) -> int:
    """Over how many devices rows are divided."""
    return mesh.shape["data"] * mesh.shape["fsdp"]
