"""Host: how much memory the devices have left."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh


def free_bytes(mesh: Mesh) -> float:
    """Bytes that every device of the mesh has left: the same number on every process."""
    local = [_free_bytes(device) for device in mesh.local_devices]
    if jax.process_count() == 1:
        return min(local)
    return float(multihost_utils.process_allgather(np.array(min(local))).min())


def _free_bytes(device: Any) -> float:
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return float(stats["bytes_limit"] - stats["bytes_in_use"])
    return _free_host_bytes() / jax.local_device_count()


def _free_host_bytes() -> float:
    """What Linux says it can give; elsewhere, 4 GiB."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return float(line.split()[1]) * 1024
    return 4.0 * 2**30
