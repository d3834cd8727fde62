"""Host: the hardware, library versions and number of steps of a run, `environment.json`, to compare its numbers."""

import json
import os
import platform
import re
from collections import Counter
from collections.abc import Collection, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

SECRET = r"TOKEN|KEY|SECRET|PASS|CREDENTIAL|AUTH"
TOTAL_STEPS = "total_steps"  # of the run, as its config and its prompts say together
_FILE = "environment.json"
_LIBRARIES = (
    "dapo_jax",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "numpy",
    "libtpu",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
)


def environment() -> dict[str, Any]:
    """The libraries' versions, the devices of all processes, and the host of this one."""
    import jax  # not above, so that `dapo-jax env` works where JAX does not

    kinds = Counter(device.device_kind for device in jax.devices())
    return {
        "versions": {"python": platform.python_version(), **versions()},
        "devices": ", ".join(f"{count} x {kind}" for kind, count in kinds.items()),
        "processes": jax.process_count(),
        "host": host(),
    }


def is_secret(variable: str, value: str = "") -> bool:
    """Whether an environment variable is secret by its name, or holds an address with a password."""
    return bool(re.search(SECRET, variable, re.IGNORECASE) or re.search(r"://[^/@\s]*:[^/@\s]+@", value))


def without_secrets(
    environment: Mapping[str, str], passed_on: Collection[str] = (), hidden: Collection[str] = ()
) -> dict[str, str]:
    """The variables that a process may have which reads hostile text.

    Args:
        passed_on: names of secret variables that it needs.
        hidden: further names of secret variables.
    """
    return {
        name: value
        for name, value in environment.items()
        if name in passed_on or not (name in hidden or is_secret(name, value))
    }


def host() -> str:
    """The processor's name (its architecture if not on Linux) and the number of cores."""
    described = Path("/proc/cpuinfo")
    lines = described.read_text(encoding="utf-8").splitlines() if described.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(names, platform.machine())}, {os.cpu_count()} cores"


def write_environment(workdir: str | os.PathLike[str], total_steps: int) -> None:
    """Writes the `environment` of this start of the run, and at which step it ends, to `environment.json`."""
    written = environment() | {TOTAL_STEPS: total_steps}
    (Path(workdir) / _FILE).write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


def recorded_environment(workdir: str | os.PathLike[str]) -> dict[str, Any]:
    """What the run's last start wrote to `environment.json`."""
    return json.loads((Path(workdir) / _FILE).read_text(encoding="utf-8"))


def recorded_version(workdir: str | os.PathLike[str]) -> str:
    """The version of dapo_jax of the run's last start; "of another version" if that is not recorded."""
    try:
        return str(recorded_environment(workdir)["versions"]["dapo_jax"])
    except (OSError, ValueError, KeyError, TypeError):
        return "of another version"


def versions() -> dict[str, str]:
    """The versions of the installed libraries."""
    found = {}
    for name in _LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
