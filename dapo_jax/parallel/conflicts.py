"""Host: packages that do not fit each other, such as a preinstalled JAX, torch_xla or libtpu, and the cure."""

import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata

from packaging.requirements import Requirement

# Packages whose requirements must hold for JAX to find its devices.
DEMANDING = ("dapo_jax", "jax", "flax", "optax", "orbax-checkpoint", "jax-cuda12-plugin", "jax-cuda13-plugin")
RIVALS = {  # packages of which only one may be installed: what happens otherwise, and the cure
    ("jax-cuda12-plugin", "jax-cuda13-plugin"): (
        "JAX then cannot register CUDA, and computes on the CPU: pip uninstall jax-cuda12-plugin jax-cuda12-pjrt (with "
        "an NVIDIA driver older than 580, those of cuda13)"
    ),
    ("libtpu", "libtpu-nightly"): (
        "both write the folder libtpu/: pip uninstall libtpu libtpu-nightly, then pip install 'dapo_jax[tpu]'"
    ),
}
PINS_LIBTPU = ("torch_xla", "tensorflow-tpu")  # they come with a libtpu of their own choice
LOADED_ONCE = ("jax", "jaxlib", "libtpu", "numpy")  # a process cannot load a second version of these
DEVICE_EXTRAS = ("tpu", "cuda12", "cuda13", "with-cuda")  # of JAX and its plugins
RESTART = "restart the kernel (in Colab: Runtime, Restart session) and import again"
_LOCK = "libtpu multi-process lockfile|in use by another process probably"
_OTHER_VERSION = r"Mismatched PJRT plugin|Unexpected PJRT_\w+ size|has no attribute 'get_library_path'"


def conflicts_here(environment: Mapping[str, str]) -> list[str]:
    """The `conflicts` of this process; `environment` is os.environ."""
    installed: dict[str, str] = {}
    for one in metadata.distributions():
        if one.name and one.version:  # broken installations have neither
            installed.setdefault(_plain(one.name), one.version)
    needs = {name: metadata.requires(name) or [] for name in DEMANDING if _plain(name) in installed}
    modules = {name: sys.modules[name] for name in (*LOADED_ONCE, "torch_xla") if name in sys.modules}
    loaded = {name: str(getattr(module, "__version__", "")) for name, module in modules.items()}
    return conflicts(installed, needs, loaded, environment)


def conflicts(
    installed: Mapping[str, str],
    needs: Mapping[str, Sequence[str]],
    loaded: Mapping[str, str],
    environment: Mapping[str, str],
) -> list[str]:
    """Sentences that name what does not fit, each with its cure.

    Args:
        installed: package -> version.
        needs: package -> what it requires, as its metadata says.
        loaded: module of this process -> its version.
        environment: variables of this process.
    """
    installed = {_plain(name): version for name, version in installed.items()}
    found = _unmet(installed, needs)
    for (one, other), outcome in RIVALS.items():
        if one in installed and other in installed:
            found.append(f"{one} and {other} are both installed, and {outcome}")
    for module in LOADED_ONCE:
        before, now = loaded.get(module), installed.get(module)
        if before and now and before != now:
            found.append(f"this process has loaded {module} {before}, but {now} is installed now: {RESTART}")
    if "torch_xla" in loaded:
        found.append(f"this process has loaded torch_xla, which sets up libtpu for itself: {RESTART} without torch_xla")
    path = environment.get("TPU_LIBRARY_PATH", "")
    if path and not path.endswith("/libtpu/libtpu.so"):  # which importing the package libtpu sets
        found.append(f"TPU_LIBRARY_PATH={path} makes JAX load that libtpu, not the installed one: unset it")
    return found


def explained(message: str, *, parent: int, installed: Iterable[str] = ()) -> str | None:
    """What a message of JAX or libtpu about its start means, with the cure; None for any other message.

    Args:
        parent: the process that started this one; in a notebook, the kernel.
        installed: the packages here.
    """
    if held := re.search(r"TPU is already in use by process with pid (\d+)", message):
        if int(held[1]) == parent:
            return (
                f"process {parent}, which started this one, holds the TPU: if it is a notebook's kernel, restart it, "
                "and run this command before a cell uses JAX"
            )
        return f"process {held[1]} holds the TPU, and only one can: end it (`ps -fp {held[1]}` shows what it is)"
    if re.search(_LOCK, message):
        return "another process holds libtpu's lock: end it; if there is none, remove /tmp/libtpu_lockfile"
    if re.search(_OTHER_VERSION, message):
        plugins = {_plain(name) for name in installed}
        extra = next((cuda for cuda in ("cuda12", "cuda13") if f"jax-{cuda}-plugin" in plugins), "tpu")
        cure = f"pip install --upgrade 'dapo_jax[{extra}]'"
        return f"the device's plugin and jaxlib are of different releases: {cure}"
    return None


def _unmet(installed: Mapping[str, str], needs: Mapping[str, Sequence[str]]) -> list[str]:
    """Requirements that the installed versions do not meet. Those of an extra count if its package is installed."""
    found = {}
    for owner, lines in needs.items():
        for line in lines:
            need = Requirement(line)
            name, version = _plain(need.name), installed.get(_plain(need.name))
            if version is None or need.specifier.contains(version, prereleases=True) or not _applies(need):
                continue
            fits = f"{need.name}{need.specifier}"
            sentence = f"{owner} {installed[_plain(owner)]} needs {fits}, but {version} is installed"
            found[owner, name] = f"{sentence}{_pinned_by(name, installed)}: pip install {shlex.quote(fits)}"
    return list(found.values())


def _pinned_by(name: str, installed: Mapping[str, str]) -> str:
    owners = [owner for owner in PINS_LIBTPU if _plain(owner) in installed]
    if name != "libtpu" or not owners:
        return ""
    return f" ({' and '.join(owners)} wanted another one, and will not work with JAX's)"


def _applies(need: Requirement) -> bool:
    """Whether it holds on this machine: without an extra, or with one that brings a package for a device."""
    if need.marker is None:
        return True
    extras = DEVICE_EXTRAS if _plain(need.name).startswith(("libtpu", "jax-cuda", "nvidia-")) else ("",)
    return any(need.marker.evaluate({"extra": extra}) for extra in extras)


def _plain(name: str) -> str:
    """A package's name as the index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()
