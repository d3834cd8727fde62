"""Host: the environment command: prints what a bug report needs, as Markdown to paste.

    dapo-jax env
    dapo-jax env check FILE.py:CLASS        plays an episode of an environment; --help says more

Versions, devices, variables and packages that do not fit each other. It works where JAX does not start, and prints no
variable whose name says that it is secret.
"""

import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

from dapo_jax import __version__
from dapo_jax.command.help import command_parser
from dapo_jax.errors import say
from dapo_jax.monitor.environment import host, is_secret, versions
from dapo_jax.parallel.conflicts import conflicts_here, explained

VARIABLES = r"(JAX|XLA|LIBTPU|TPU|DAPO_JAX)_.*|CUDA_VISIBLE_DEVICES|LD_LIBRARY_PATH|PJRT_DEVICE"
DEVICES_TIMEOUT_S = 120.0
DEVICES = "import jax; print(jax.device_count(), 'x', jax.devices()[0].device_kind)"


def report(environment: Mapping[str, str]) -> str:
    """The Markdown; `environment` is os.environ."""
    found = versions()
    rows = {
        "dapo_jax": found.pop("dapo_jax", f"{__version__}, not installed"),
        "Python": f"{platform.python_version()}, {_kind_of_environment(environment)}",
        "platform": platform.platform(),
        "host": host(),
        "notebook": notebook(environment),
        "JAX devices": devices(),
        **found,
    }
    named = {name: value for name, value in sorted(environment.items()) if is_shown(name, value)}
    unfit = conflicts_here(environment)
    parts = [
        ["| | |", "| --- | --- |", *(f"| {name} | {_cell(value)} |" for name, value in rows.items())],
        [f"- `{name}={value}`" for name, value in named.items()] or ["No variable of JAX or its devices is set."],
        [f"- conflict: {one}" for one in unfit] or ["No known conflict of versions."],
    ]
    return "\n\n".join("\n".join(lines) for lines in parts).replace(os.path.expanduser("~"), "~")


def notebook(environment: Mapping[str, str]) -> str:
    """Where the process runs: Colab, Kaggle, another Jupyter, or no notebook."""
    if "COLAB_RELEASE_TAG" in environment or "google.colab" in sys.modules:
        return "Colab"
    if "KAGGLE_KERNEL_RUN_TYPE" in environment:
        return "Kaggle"
    return "Jupyter" if "JPY_PARENT_PID" in environment or "ipykernel" in sys.modules else "no"


def is_shown(variable: str, value: str) -> bool:
    """Whether it may matter to JAX, and is not secret."""
    return re.fullmatch(VARIABLES, variable) is not None and not is_secret(variable, value)


def devices() -> str:
    """What JAX finds, or why it does not start. This runs in another process, because it may crash or hang."""
    if "jax" in sys.modules:  # as in a notebook, which may hold the TPU
        return _devices_here()
    try:
        done = subprocess.run(
            [sys.executable, "-c", DEVICES], capture_output=True, text=True, timeout=DEVICES_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return f"JAX found none within {DEVICES_TIMEOUT_S:.0f} s; on several hosts it waits for the others"
    if done.returncode < 0:
        return f"JAX ended with {signal.Signals(-done.returncode).name}: its plugin may be of another release"
    if done.returncode:
        return _failure((done.stderr.strip().splitlines() or [""])[-1])
    return done.stdout.strip()


def _devices_here() -> str:
    try:
        import jax

        return f"{jax.device_count()} x {jax.devices()[0].device_kind}"
    except Exception as error:  # whatever JAX raises is what the report is about
        return _failure(f"{type(error).__name__}: {error}")


def _failure(message: str) -> str:
    meaning = explained(message, parent=os.getppid(), installed=versions())
    return f"JAX does not start: {message}" + (f"; {meaning}" if meaning else "")


def _kind_of_environment(environment: Mapping[str, str]) -> str:
    if sys.prefix != sys.base_prefix:
        return "in a virtual environment"
    return "of conda" if "CONDA_PREFIX" in environment else "of the system"


def _cell(text: str) -> str:
    """One line of a table."""
    return " ".join(text.replace("|", "\\|").split())


def main(arguments: Sequence[str] | None = None) -> None:
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["check"]:
        from dapo_jax.tools import env_check  # what it imports need not start where this report is made

        env_check.main(given[1:])
        return
    parser = command_parser("dapo-jax env", __doc__)
    parser.parse_args(arguments)
    say(report(os.environ))
