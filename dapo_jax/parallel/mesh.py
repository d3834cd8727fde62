"""Device: the meshes ("data", "fsdp", "tensor") over which the functions of a run are sharded.

With mesh.expert there is a fourth axis, "expert", before "tensor": one more for rows and parameters, but for the
parameters of experts, which it divides by expert. With mesh.context the mesh that trains has a part of its "fsdp" as
"context": it divides parameters like "fsdp", and of activations the tokens of each sequence.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from dapo_jax.errors import InputError, divisors, nearest

AXES = ("data", "fsdp", "expert", "context", "tensor")
IF_DIVIDED = ("expert", "context")  # axes that a mesh has if they are more than 1
BATCH_AXES = ("data", "fsdp", "expert")  # for rows of prompts, responses and training batches
EXPERT_AXES = ("expert", "tensor")  # for experts
HEAD_AXES = ("tensor", "context")  # for heads, while attention has all tokens of a sequence


class Meshes(NamedTuple):
    """A run's two meshes: the same devices, perhaps divided differently, or devices of their own."""

    training: Mesh
    sampling: Mesh


def make_mesh(
    data: int,
    fsdp: int,
    tensor: int,
    devices: Sequence[Any] | None = None,
    *,
    expert: int = 1,
    in_order: bool = False,
) -> Mesh:
    """A mesh over all devices, or over those given. `data=-1` takes the devices that the other axes leave.

    Args:
        expert: 1 = without this axis.
        in_order: keep the order of `devices` instead of arranging them by their links; for a part of a slice.

    Raises:
        InputError: the product of the axes is not the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    others = fsdp * expert * tensor
    if data == -1 and len(devices) % others == 0:
        data = len(devices) // others
    if data * others != len(devices):
        raise InputError(_misfit(data, fsdp, expert, tensor, devices))
    axes = {"data": data, "fsdp": fsdp, "expert": expert, "tensor": tensor}
    if in_order and devices is not None:
        return _laid_out(np.array(devices), axes)
    shape, names = _present(axes)
    try:
        return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names), devices=devices)
    except NotImplementedError as error:  # the sides of the slice do not multiply to the axes
        given = ", ".join(f"mesh.{name}={size}" for name, size in zip(names, shape, strict=True))
        raise InputError(
            f"{given} cannot be laid out on this slice: choose axes that are products of its sides ({error})"
        ) from error


def with_tensor(mesh: Mesh, tensor: int, context: int = 1) -> Mesh:
    """The devices of `mesh` in the same order, `tensor` and `context` of them along these axes, the rest along "fsdp".

    If `tensor` divides the old size, each group along "tensor" is a part of an old one, and so stays within its host.
    """
    both = mesh.shape["fsdp"] * mesh.shape.get("context", 1) * mesh.shape["tensor"]
    axes = {"fsdp": both // (context * tensor), "context": context, "tensor": tensor}
    return _laid_out(mesh.devices, {**mesh.shape, **axes})


def _laid_out(devices: np.ndarray, axes: Mapping[str, int]) -> Mesh:
    """A mesh of the devices in their order."""
    shape, names = _present(axes)
    return Mesh(devices.reshape(shape), names, axis_types=(AxisType.Auto,) * len(names))


def _present(axes: Mapping[str, int]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The sizes and the names of the axes that a mesh has."""
    names = tuple(name for name in AXES if name not in IF_DIVIDED or axes.get(name, 1) > 1)
    return tuple(axes[name] for name in names), names


def _misfit(data: int, fsdp: int, expert: int, tensor: int, devices: Sequence[Any]) -> str:
    """The message for axes whose product is not the number of devices, with values that fit."""
    count, platform, fixed = len(devices), devices[0].platform, expert * tensor
    here = f"{count} ({platform})"
    names = [f"mesh.fsdp={fsdp}", *[f"mesh.expert={expert}"] * (expert > 1), f"mesh.tensor={tensor}"]
    if data == -1:
        message = f"{' x '.join(names)} must divide the number of devices, {here}"
    else:
        message = f"{' x '.join([f'mesh.data={data}', *names])} must be the number of devices, {here}"
    cures = []
    if data != -1 and count % (fsdp * fixed) == 0:
        cures.append("mesh.data=-1")
    elif count % fixed == 0:
        cures.append(f"{'' if data == -1 else 'mesh.data=-1 and '}mesh.fsdp={nearest(divisors(count // fixed), fsdp)}")
    else:
        others = "mesh.fsdp=1, mesh.expert=1" if expert > 1 else "mesh.fsdp=1"
        cures.append(
            f"{'' if data == -1 else 'mesh.data=-1, '}{others} and mesh.tensor={nearest(divisors(count), tensor)}"
        )
    wanted = abs(data) * fsdp * fixed
    if platform == "cpu" and wanted > count:
        cures.append(f"JAX_NUM_CPU_DEVICES={wanted} in the environment, to try it on a CPU")
    return f"{message}: set {', or '.join(cures)}"


def split_devices(sampling: int, tensor: int) -> tuple[list[Any], list[Any]]:
    """The devices that train and those that sample at the same time, with the same split in every process.

    Args:
        sampling: devices that sample, over all processes; 0 = half of all.
        tensor: size of the "tensor" axis of both meshes, which lies within a process.

    Raises:
        InputError: the devices cannot be divided like this.
    """
    own, processes = jax.local_device_count(), jax.process_count()
    of_process = (sampling or jax.device_count() // 2) // processes
    if sampling % processes or not 0 < of_process < own or of_process % tensor or (own - of_process) % tensor:
        fitting = [one * processes for one in range(tensor, own, tensor) if (own - one) % tensor == 0]
        cure = "lower mesh.tensor, or start one process for all devices of a host"
        if fitting:
            cure = f"set trainer.rollout_devices={nearest(fitting, sampling or own * processes // 2)}"
        raise InputError(
            f"trainer.rollout_devices={sampling} must leave each of the {processes} processes a multiple of "
            f"mesh.tensor={tensor} devices to train and one to sample, out of {own}: {cure}"
        )
    by_process = [[device for device in jax.devices() if device.process_index == i] for i in range(processes)]
    training = [device for devices in by_process for device in devices[:-of_process]]
    return training, [device for devices in by_process for device in devices[-of_process:]]


def num_batch_shards(mesh: Mesh) -> int:
    """The number of devices over which rows are divided."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES if axis in mesh.shape)


def platform(mesh: Mesh) -> str:
    """The devices' platform: cpu, gpu or tpu. They may be absent from this machine."""
    return mesh.devices.flat[0].platform
