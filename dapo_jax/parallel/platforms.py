"""Host: why JAX does not find the requested devices, or leaves a GPU unused, and what to install."""

import importlib.util
import os
import re
import socket
import subprocess
import traceback
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import takewhile
from pathlib import Path

import jax

from dapo_jax.parallel.conflicts import conflicts_here, explained
from dapo_jax.parallel.processes import gather

CUDA13_DRIVER = 580  # the oldest that runs CUDA 13; CUDA 12 needs 525
PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
NVIDIA_SMI_TIMEOUT_S = 60
_DRIVER_FILE = Path("/proc/driver/nvidia/version")


def start_failure(error: BaseException) -> str | None:
    """Why JAX could not start the devices of JAX_PLATFORMS, with the fix; None for any other error.

    Call it only before the process ends: it resets JAX_PLATFORMS to list the devices that JAX finds without it.
    """
    failed, asked = failed_platform(error), _asked()
    if failed is None:
        return None
    reason = str(error).partition("\n")[0].partition(" (set JAX_PLATFORMS")[0]
    installed = [name for name in (*PLUGINS, "libtpu") if importlib.util.find_spec(name) is not None]
    missing = explained(reason, parent=os.getppid(), installed=installed) or missing_for(failed)
    if reason and "is not in the list" not in reason and "cannot open shared object" not in reason:
        missing += f" ({reason})"
    began = f"JAX_PLATFORMS={asked} cannot be used: " if asked else "JAX cannot start its devices: "
    unfit = "".join(f"; {conflict}" for conflict in conflicts_here(os.environ))
    return f"{began}{missing}{unfit}; without JAX_PLATFORMS, JAX finds {_devices_without_a_choice()}"


def failed_platform(error: BaseException) -> str | None:
    """The platform that JAX could not start; None for any other error."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, AssertionError) and frames and frames[-1].name == "backends":  # JAX's: no NVIDIA GPU
        return "cuda"
    found = re.match("Unable to initialize backend '(.*?)'", str(error)) if isinstance(error, RuntimeError) else None
    return found[1] if found else None


def missing_for(platform: str) -> str:
    """Why JAX finds no "gpu" (or "cuda", "rocm") or "tpu" in this machine, with the fix."""
    if platform in ("gpu", "cuda", "rocm"):
        return _missing_for_gpus(nvidia_driver())
    if platform == "tpu" and importlib.util.find_spec("libtpu") is None:
        return "libtpu is not installed: on a TPU machine, pip install 'dapo_jax[tpu]'"
    if platform == "tpu":
        return "libtpu finds no free TPU: run on a TPU machine, and end other programs that use its TPU"
    return f"JAX has no platform {platform!r} here: use cpu, cuda or tpu"


def unused_gpu() -> str | None:
    """A warning if this machine has an NVIDIA GPU that JAX does not use, although nothing tells it not to."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1")
    if hidden or _asked() or jax.default_backend() != "cpu" or (driver := nvidia_driver()) is None:
        return None
    return f"JAX computes on the CPU: {_missing_for_gpus(driver)}; to use the CPU, set JAX_PLATFORMS=cpu"


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


def nvidia_smi(*arguments: str, environment: Mapping[str, str] = os.environ) -> subprocess.CompletedProcess[str] | None:
    """The result of NVIDIA's nvidia-smi; None if it is not installed or does not answer."""
    command = ["nvidia-smi", *arguments]
    try:
        return subprocess.run(
            command, env=dict(environment), timeout=NVIDIA_SMI_TIMEOUT_S, capture_output=True, text=True
        )
    except (OSError, subprocess.TimeoutExpired):
        return None


def nvidia_driver() -> tuple[str, str] | None:
    """This machine's GPUs ("" if unknown) and their driver's version; None without a driver."""
    listed = nvidia_smi("--query-gpu=name,driver_version", "--format=csv,noheader")
    lines = listed.stdout.splitlines() if listed is not None and listed.returncode == 0 else []
    rows = [line.rsplit(", ", 1) for line in lines if ", " in line]
    if rows:
        return _counted(name for name, _ in rows), rows[0][1].strip()
    try:
        found = re.search(r"\d{3,}\.[\d.]+", _DRIVER_FILE.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return ("", found[0]) if found else None


def _asked() -> str:
    """The platforms that JAX is configured to use; "" if it chooses."""
    return jax.config.jax_platforms or ""  # pyright: ignore[reportAttributeAccessIssue]


def _missing_for_gpus(driver: tuple[str, str] | None) -> str:
    plugins = [name for name in PLUGINS if importlib.util.find_spec(name) is not None]
    if driver is None:
        found = "there is no NVIDIA driver here (nvidia-smi, /proc/driver/nvidia)"
        if plugins:
            return f"{found} ({plugins[0]} is installed): install the driver, or start the container with --gpus all"
        return f"{found}, and no CUDA plugin of JAX is installed: on a GPU machine, pip install 'dapo_jax[cuda13]'"
    names, version = driver
    extra = "cuda13" if int(version.partition(".")[0]) >= CUDA13_DRIVER else "cuda12"
    here = f"the NVIDIA driver {version} is here" + (f" with {names}" if names else "")
    if not plugins:
        return f"{here}, and no CUDA plugin of JAX is installed: pip install 'dapo_jax[{extra}]'"
    if extra == "cuda12" and plugins == [PLUGINS[0]]:
        return (
            f"{here}, and {plugins[0]} needs driver {CUDA13_DRIVER} or newer: pip install 'dapo_jax[cuda12]', or "
            "update the driver"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    hidden = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
    return f"{here} and {plugins[0]} is installed, but it finds no usable GPU{hidden}: see `nvidia-smi`"


def _devices_without_a_choice() -> str:
    jax.config.update("jax_platforms", None)
    try:
        return _counted(device.device_kind for device in jax.devices())
    except (RuntimeError, AssertionError):
        return "no device"


def _counted(names: Iterable[str]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in Counter(names).items())
