"""Host: free memory of devices and hosts, and the share of GPU memory that JAX takes."""

import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # JAX's variable: the share of GPU memory it takes at start


def reserve_gpu_memory(fraction: float) -> None:
    """Lets JAX take this share of each GPU's memory, unless the environment sets one. Call it before JAX starts."""
    if "XLA_CLIENT_MEM_FRACTION" not in os.environ:  # JAX refuses both names together
        os.environ.setdefault(FRACTION, str(fraction))


def free_bytes(mesh: Mesh) -> float:
    """Bytes free on every device of the mesh: the minimum, and the same number on every process."""
    local = [_free_bytes(device) for device in mesh.local_devices]
    if jax.process_count() == 1:
        return min(local)
    return float(multihost_utils.process_allgather(np.array(min(local))).min())


def _free_bytes(device: Any) -> float:
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return float(stats["bytes_limit"] - stats["bytes_in_use"])
    of_host = _host_bytes().get("MemAvailable", 4.0 * 2**30)  # unknown on other systems than Linux
    return of_host / jax.local_device_count()


def used_host_bytes() -> float | None:
    """Bytes of this host's memory in use; None if unknown (not Linux)."""
    found = _host_bytes()
    return found["MemTotal"] - found["MemAvailable"] if {"MemTotal", "MemAvailable"} <= set(found) else None


def _host_bytes() -> dict[str, float]:
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return {}
    lines = [line.split() for line in meminfo.read_text(encoding="ascii").splitlines()]
    return {name.rstrip(":"): float(kibibytes) * 1024 for name, kibibytes, *_ in lines}
