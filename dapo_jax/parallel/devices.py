"""Host: peak figures of accelerators, and devices that this machine does not have."""

import importlib.util
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.experimental import topologies

from dapo_jax.errors import InputError
from dapo_jax.parallel.gpus import GPUS
from dapo_jax.parallel.platforms import failed_platform, missing_for
from dapo_jax.parallel.slices import SLICES, libtpu_name, slice_devices

GIB = 2.0**30
AMPERE = 8  # the major compute capability from which Triton compiles


@dataclass(frozen=True)
class Limits:
    """The peak figures of one JAX device; None = unknown."""

    name: str
    memory: float | None  # bytes
    flops: float | None  # FLOP/s of dense bfloat16 products
    bandwidth: float | None  # bytes/s of its memory
    link: float | None  # bytes/s that a device sends in a collective along one mesh axis, both directions of a ring
    network: float | None = None  # bytes/s that a device sends to other hosts; None: links reach them too
    float32_flops: float | None = None  # FLOP/s of float32 products; None: six bfloat16 products each, as on TPUs

    def of_dtype(self, dtype: str) -> "Limits":
        """These limits, with `flops` for products of `dtype`."""
        if dtype != "float32":
            return self
        return replace(self, flops=self.float32_flops or (self.flops and self.flops / 6))

    def speed(self, group: int, per_host: int) -> float:
        """bytes/s that a device sends in a collective of `group` devices, `per_host` of them on each host.

        A ring through several hosts leaves each host once, over the network cards of the group's devices there.
        """
        assert self.link is not None
        if self.network is None or per_host == group:
            return self.link
        return min(self.link, per_host * self.network)

    def usable_memory(self, platform: str, gpu_memory_fraction: float) -> float | None:
        """Bytes that JAX may take on such a device; None if its memory is unknown."""
        return self.memory and self.memory * (gpu_memory_fraction if platform == "gpu" else 1.0)

    @property
    def is_known(self) -> bool:
        """Whether the figures suffice to estimate a time."""
        return None not in (self.flops, self.bandwidth, self.link)


# Sources: Google Cloud's "TPU architecture" pages, for links also https://jax-ml.github.io/scaling-book/tpus. A JAX
# device is one chip, on TPU7x half a chip. GPUs: parallel/gpus.py.
LIMITS = {
    "TPU v4": Limits("TPU v4", 32 * GIB, 275e12, 1.23e12, 9e10),
    "TPU v5 lite": Limits("TPU v5e", 16 * GIB, 197e12, 0.82e12, 9e10),
    "TPU v5": Limits("TPU v5p", 95 * GIB, 459e12, 2.77e12, 1.8e11),
    "TPU v6 lite": Limits("TPU v6e", 32 * GIB, 918e12, 1.64e12, 1.8e11),
    "TPU7x": Limits("TPU7x", 96 * GIB, 1153e12, 3.69e12, 1.8e11),
} | {
    gpu.kind: Limits(name.upper(), gpu.memory, gpu.flops, gpu.bandwidth, gpu.link, gpu.network, gpu.float32_flops)
    for name, gpu in GPUS.items()
}


def limits_of(device: Any) -> Limits:
    """The limits of `device` by its `device_kind`; for a TPU, by the longest prefix of it in LIMITS."""
    kind = device.device_kind
    names = [name for name in LIMITS if kind == name or (name.startswith("TPU") and kind.startswith(name))]
    if not names:
        return Limits(kind, None, None, None, None)
    return LIMITS[max(names, key=len)]


def multiplies_bfloat16(device: Any) -> bool:
    """Whether bfloat16 products are fast: not on CPUs, nor on NVIDIA GPUs before Ampere (T4, V100)."""
    return device.platform != "cpu" and not is_before_ampere(device)


def is_before_ampere(device: Any) -> bool:
    """Whether this is an NVIDIA GPU before Ampere (T4, V100), for which Triton does not compile."""
    generation = cuda_generation(device)
    return generation is not None and generation < AMPERE


def cuda_generation(device: Any) -> int | None:
    """An NVIDIA GPU's major compute capability: 7 (V100, T4), 8 (A100, L4), 9 (H100), 10; None for other devices."""
    found = re.match(r"(\d+)\.\d+$", getattr(device, "compute_capability", ""))
    return int(found[1]) if found else None


def devices_of(topology: str, num_devices: int) -> Sequence[Any]:
    """The devices to compile for. Nothing is allocated on them.

    Args:
        topology: absent devices: "v5p:4x4x8" (any slice that libtpu knows) or its name in Google Cloud, "v5p-256";
            "h100:8" or "h100:4x8" (GPUs, or hosts x GPUs, with a name in GPUS). Or this machine's devices: "cpu"
            (as many fake devices as the mesh needs, if JAX has not started yet), "gpu" or "tpu".
        num_devices: for "cpu".

    Raises:
        InputError: there are no such devices; the message says what to do.
    """
    given = topology.lower()
    topology = libtpu_name(given)
    name, _, shape = topology.partition(":")
    if (name == "gpu" and shape) or name == "v100":
        raise InputError(
            f"--topology={topology} must name a GPU that CUDA 13 knows: choose {_known_gpus(shape or '8')}"
        )
    if name in GPUS:
        return _gpus(topology)
    try:
        if not shape:
            if name == "cpu":
                jax.config.update("jax_platforms", "cpu")
                with suppress(RuntimeError):  # JAX has already started: its devices cannot change
                    jax.config.update("jax_num_cpu_devices", num_devices)
            return jax.devices(name)
        return slice_devices(topology)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        if failed_platform(error) is not None:
            raise  # the command reports what is missing
        if name in ("gpu", "tpu"):
            raise InputError(
                f"--topology={name} means the devices of this machine, but {missing_for(name)}; for devices of another "
                f"machine give their name, such as {'h100:8' if name == 'gpu' else 'v5e-16'}"
            ) from error
        if name in SLICES and importlib.util.find_spec("libtpu") is None:
            raise InputError(
                f"--topology={given} needs libtpu, which compiles for TPUs: pip install 'dapo_jax[tpu-preflight]'"
            ) from error
        raise InputError(
            f"--topology={given} must be a TPU slice, such as v5e-16, v5e:4x4 or v5p:4x4x8 (pip install "
            f"'dapo_jax[tpu-preflight]'), a GPU, {_known_gpus('8')}, or cpu, gpu or tpu for those of this machine: "
            f"correct it. {str(error).partition(chr(10))[0]}"
        ) from error


def _gpus(topology: str) -> Sequence[Any]:
    """Absent GPUs: "NAME:GPUS" on one host, or "NAME:HOSTSxGPUS"."""
    name, _, shape = topology.partition(":")
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)?", shape):
        raise InputError(
            f"--topology={topology} must be {name}:GPUS or {name}:HOSTSxGPUS: give, for example, {name}:8 or {name}:2x8"
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # do not touch a GPU of this machine
    jax.config.update("jax_platforms", "cpu")
    hosts, _, per_host = shape.rpartition("x")
    try:
        return topologies.get_topology_desc(
            platform="cuda", target_config=GPUS[name].target_config, topology=f"1x{hosts or 1}x{per_host}"
        ).devices
    except (RuntimeError, ValueError, NotImplementedError) as error:
        version = jax.__version__
        raise InputError(
            f"--topology={topology} needs JAX's compiler for GPUs: pip install 'dapo_jax[cuda13]', or, without "
            f"CUDA's libraries, pip install --no-deps jax-cuda13-plugin=={version} jax-cuda13-pjrt=={version} "
            f"'nvidia-cudnn-cu13<10' ({error})"
        ) from error


def _known_gpus(shape: str) -> str:
    return "one of " + ", ".join(f"{name}:{shape}" for name in GPUS)
