"""Host: what accelerators can do at most, and devices that are not in this machine."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies


@dataclass(frozen=True)
class Limits:
    """Of one JAX device; a figure that is not known is None."""

    name: str
    memory: float | None  # bytes
    flops: float | None  # FLOP/s of dense bfloat16 products
    bandwidth: float | None  # bytes/s of the memory
    link: float | None  # bytes/s that a device sends in a collective along one mesh axis, both directions of a ring

    @property
    def is_known(self) -> bool:
        """Whether a time can be estimated."""
        return None not in (self.flops, self.bandwidth, self.link)


GIB = 2.0**30
# Sources: TPUs: Google Cloud's "TPU architecture" pages, for links also https://jax-ml.github.io/scaling-book/tpus;
# GPUs: NVIDIA's data sheets of the SXM modules, NVLink in one direction. A JAX device is a chip, of TPU7x half a chip.
LIMITS = {
    "TPU v4": Limits("TPU v4", 32 * GIB, 275e12, 1.23e12, 9e10),
    "TPU v5 lite": Limits("TPU v5e", 16 * GIB, 197e12, 0.82e12, 9e10),
    "TPU v5": Limits("TPU v5p", 95 * GIB, 459e12, 2.77e12, 1.8e11),
    "TPU v6 lite": Limits("TPU v6e", 32 * GIB, 918e12, 1.64e12, 1.8e11),
    "TPU7x": Limits("TPU7x", 96 * GIB, 1153e12, 3.69e12, 1.8e11),
    "A100": Limits("A100", 80e9, 312e12, 2.04e12, 3e11),
    "H100": Limits("H100", 80e9, 989e12, 3.35e12, 4.5e11),
    "H200": Limits("H200", 141e9, 989e12, 4.8e12, 4.5e11),
}


def limits_of(device: Any) -> Limits:
    """What `device` can do, by the part of its `device_kind` that LIMITS has; its own memory where it knows it."""
    kind = device.device_kind
    names = [name for name in LIMITS if name in kind]
    if not names:
        return Limits(kind, None, None, None, None)
    return LIMITS[max(names, key=len)]


def devices_of(topology: str, num_devices: int) -> Sequence[Any]:
    """The devices to compile for. Nothing is allocated on them.

    Args:
        topology: "v5p:4x4x8" (any name that libtpu knows: a TPU slice that need not be there), "cpu" (as many fake
            devices as the mesh wants, if JAX has not been started yet), or "gpu" or "tpu" (those of this machine).
        num_devices: for "cpu".

    Raises ValueError with the cure if there are none.
    """
    try:
        if ":" not in topology:
            if topology == "cpu":
                _start_cpu(num_devices)
            return jax.devices(topology)
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # libtpu would ask a metadata server what machine this is
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # it opens no chip
        jax.config.update("jax_platforms", "cpu")  # JAX itself must not look for the TPU
        return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise ValueError(
            f"--topology={topology} must be a slice that libtpu knows, such as v5e:4x4 or v5p:4x4x8 (pip install "
            f"'dapo_jax[tpu-preflight]'), or one of cpu, gpu and tpu, which this machine has: {error}"
        ) from error


def _start_cpu(num_devices: int) -> None:
    jax.config.update("jax_platforms", "cpu")
    try:
        jax.config.update("jax_num_cpu_devices", num_devices)
    except RuntimeError:  # JAX has been started: the devices are those that there are
        pass
