"""Host: GPUs of this host that no process of the run uses."""

import os
import re
import socket
from collections.abc import Mapping
from itertools import takewhile

import jax

from dapo_jax.parallel.platforms import nvidia_smi
from dapo_jax.parallel.processes import gather


def idle_gpus(environment: Mapping[str, str] = os.environ) -> str | None:
    """A warning if JAX uses only some of this host's GPUs; None if it uses them all.

    Every process must call it.
    """
    host = socket.gethostname()
    devices = [count for name, count in gather([host, jax.local_device_count()]) if name == host]
    named = gpus_of_host(environment, len(devices))
    source, count = max(named.items(), key=lambda item: item[1], default=("", 0))
    if sum(devices) >= count:
        return None
    return (
        f"JAX uses {sum(devices)} of the {count} GPUs that {source} names on {host}: under Slurm start a task per GPU, "
        "elsewhere correct CUDA_VISIBLE_DEVICES or JAX_LOCAL_DEVICE_IDS; if it is intended, set mesh.data, now -1"
    )


def gpus_of_host(environment: Mapping[str, str], num_processes: int) -> dict[str, int]:
    """The number of GPUs that this host has for the run, by source.

    Args:
        num_processes: of the run on this host.
    """
    found = {}
    if "CUDA_VISIBLE_DEVICES" in environment:
        visible = [name.strip() for name in environment["CUDA_VISIBLE_DEVICES"].split(",")]
        found["CUDA_VISIBLE_DEVICES"] = len(list(takewhile(lambda name: name not in ("", "-1"), visible)))
    for name, factor in (("SLURM_GPUS_ON_NODE", 1), ("SLURM_GPUS_PER_TASK", num_processes)):
        if number := re.search(r"\d+$", environment.get(name, "")):  # 4, or a100:4
            found[name] = int(number[0]) * factor
    listed = nvidia_smi("--list-gpus", environment=environment)
    if listed is None:
        return found
    return found | {"nvidia-smi": len(re.findall(r"^GPU \d", listed.stdout, re.MULTILINE))}
