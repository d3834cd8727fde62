"""Commands of the shell that stand in for Python, gcloud or Slurm, and note how they are called."""

import os
import subprocess
from pathlib import Path

from waiting import LIMIT_S

NOTE = '{ printf \'%s\' "${0##*/}"; printf \' <%s>\' "$@"; echo; } >>"$CALLS"\n'  # a line per call: name <argument> ...


def stand_in(path: Path, text: str = "") -> Path:
    """Makes a command that notes its call and does what `text` says in bash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{NOTE}{text}")
    path.chmod(0o755)
    return path


def start(*command: str | Path, folder: Path, tools: Path, **variables: str) -> subprocess.Popen[str]:
    """Starts bash in `folder`, in a session of its own; the commands in `tools` come before others."""
    env = {**os.environ, "CALLS": str(tools / "calls"), "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", **variables}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(
        ["bash", *map(str, command)], cwd=folder, env=env, text=True, start_new_session=True, **pipes
    )


def call(*command: str | Path, folder: Path, tools: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """The same to its end."""
    process = start(*command, folder=folder, tools=tools, **variables)
    stdout, stderr = process.communicate(timeout=LIMIT_S)
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def calls_of(tools: Path) -> list[str]:
    """The calls that were noted since the last look."""
    file = tools / "calls"
    lines = file.read_text().splitlines() if file.exists() else []
    file.unlink(missing_ok=True)
    return lines
