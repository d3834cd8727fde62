"""Processes that share their imports: one imports JAX and the commands, and forks the others before JAX starts.

    python tests/forked.py FOLDER < PROCESSES

PROCESSES: a JSON list of `Process`. All run at the same time; FOLDER gets what they print, so that no pipe fills up.
Prints their exit codes as a JSON list.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from waiting import LIMIT_S

ROOT = Path(__file__).parents[1]
CLUSTERS = ("OMPI_", "SLURM_", "TPU_", "MEGASCALE_", "KUBERNETES_", "JOB_COMPLETION_INDEX", "JAX_COORDINATOR", "GCE_")
COMMAND = "from importlib import import_module; from dapo_jax.cli import COMMANDS\n"
COMMAND += "import_module(COMMANDS['{0}'][0]).main()"  # of a command by its name
READ_AT_IMPORT = ("JAX_NUM_CPU_DEVICES", "JAX_PLATFORMS")  # by JAX


class Process(NamedTuple):
    code: str
    arguments: Sequence[str] = ()  # of the command line
    environment: Mapping[str, str] = {}


class Ended(NamedTuple):
    """How a process ended; the code of a signal is negative."""

    code: int
    output: str
    errors: str


def run_together(processes: Sequence[Process], at_import: Mapping[str, str] | None = None) -> list[Ended]:
    """How each of the processes ended. `at_import`: variables for the process that imports JAX."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(CLUSTERS)}
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    with tempfile.TemporaryDirectory() as folder:
        parent = subprocess.Popen(
            [sys.executable, __file__, folder],
            env={**inherited, "PYTHONPATH": path, **(at_import or {})},
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            output, errors = parent.communicate(json.dumps(processes), LIMIT_S)
        finally:
            if parent.poll() is None:
                os.killpg(parent.pid, signal.SIGKILL)
        assert parent.returncode == 0, errors
        printed = [[_file(folder, number, stream).read_text() for stream in (1, 2)] for number in range(len(processes))]
        return [Ended(code, *texts) for code, texts in zip(json.loads(output), printed, strict=True)]


def assert_succeeded(ends: Sequence[Ended]) -> None:
    """Fails with the last that each process said; pytest would cut a list of them."""
    told = "".join(f"\n--- process {number}: {one.errors[-3000:]}" for number, one in enumerate(ends))
    assert [one.code for one in ends] == [0] * len(ends), told


def options(values: Mapping[str, Any]) -> list[str]:
    """The command line of the small recipe with these options."""
    return ["--config", "tests/small_recipe.py", *(f"--config.{name}={value}" for name, value in values.items())]


def together(port: int, process: int, number: int = 2) -> dict[str, Any]:
    """The options of one of several processes of a run."""
    given = {"coordinator": f"127.0.0.1:{port}", "num_processes": number, "process_id": process}
    return {f"trainer.{name}": value for name, value in given.items()}


def _file(folder: str, number: int, stream: int) -> Path:
    return Path(folder) / f"{number}.{stream}"


def main() -> None:
    import jax

    from dapo_jax.evaluate import evaluate  # noqa: F401
    from dapo_jax.export import export  # noqa: F401
    from dapo_jax.training import loop as training  # noqa: F401

    children = []
    for number, process in enumerate(Process(*values) for values in json.load(sys.stdin)):
        if (child := os.fork()) == 0:
            for stream in (1, 2):
                os.dup2(os.open(_file(sys.argv[1], number, stream), os.O_CREAT | os.O_RDWR), stream)
            os.environ.update(process.environment)
            for name in READ_AT_IMPORT:
                if value := process.environment.get(name):
                    jax.config.update(name.lower(), int(value) if value.isdigit() else value)
            sys.argv = ["command", *process.arguments]
            return exec(process.code, {"__name__": "__main__"})
        children.append(child)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]))


if __name__ == "__main__":
    main()
