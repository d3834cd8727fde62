"""Host: what a run has written to its work directory, complete or not."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapo_jax.errors import InputError
from dapo_jax.monitor.environment import recorded_environment
from dapo_jax.monitor.log import LOG
from dapo_jax.monitor.recipe import Recipe, recorded_options, recorded_recipe
from dapo_jax.monitor.records import METRICS, read_metrics, sample_files
from dapo_jax.monitor.workdir import run_name

_LINE = re.compile(r"\[([\d :-]+)\] (\w+): (.*)")
_DESCRIPTION = re.compile(r"(devices|data): | problems to train on, \d+ to evaluate on$")  # the latter as it once was
SWEEP = "sweep.txt"  # file in the folder of several runs: the folder of each, a line each
SOLVED = "the data is solved: "
_IN_REPORT = re.compile(r"alarm at step \d+: ")  # messages that the report shows elsewhere
_ERRORS = ("ERROR", "CRITICAL")
_LOUD = ("WARNING", *_ERRORS)

Row = dict[str, Any]


@dataclass(frozen=True)
class RunFiles:
    """A run as its files tell it. What is missing or damaged is empty."""

    name: str
    folder: Path
    config: dict[str, Any]  # every option by dotted key
    recipe: Recipe | None
    environment: dict[str, Any]
    rows: list[Row]  # of metrics.jsonl; step 0 is the evaluation before training
    samples: dict[int, Path]  # step -> its file
    description: str  # the log's lines on model, devices and problems
    last_line: str  # time of the log's last message
    error: str  # the log's last message, if it is an error or says that the data is solved
    warnings: list[tuple[str, int]]  # last message of its kind in the log, how many of that kind
    seeds: "tuple[RunFiles, ...]" = ()  # the runs that this one is the mean of; none for a run
    note: str = ""  # on them

    @property
    def steps(self) -> list[Row]:
        """The rows of training steps."""
        return [row for row in self.rows if row["step"] > 0]

    def option(self, key: str) -> Any:
        """The value of an option; None if the run has not recorded it."""
        return self.config.get(key)


def runs_of(name: str, workdir: str) -> list[tuple[str, str]]:
    """Name and workdir of each run of a sweep that has begun; of anything else, as they are."""
    folder = Path(workdir).expanduser()
    text = (folder / SWEEP).read_text(encoding="utf-8", errors="replace") if (folder / SWEEP).exists() else ""
    begun = [run for run in text.splitlines() if (folder / run / METRICS).exists()]
    return [(run, str(folder / run)) for run in begun] or [(name, workdir)]


def read_run(name: str, workdir: str) -> RunFiles:
    """The files of the run in `workdir`.

    Raises:
        InputError: it is not the work directory of a run, or a file of it is not what a run writes.
        RuntimeError: a line of metrics.jsonl before the last one is damaged.
    """
    folder = Path(workdir).expanduser()
    if not folder.is_dir():
        raise InputError(f"{workdir} is not a directory: give the workdir of a run on this machine")
    config = recorded_options(folder)
    if not config and not (folder / METRICS).exists():
        raise InputError(f"{workdir} has no config.json and no {METRICS}: give the workdir of a run")
    description, last_line, error, warnings = _read_log(folder / LOG)
    return RunFiles(
        name=name or run_name(folder),
        folder=folder,
        config=config,
        recipe=recorded_recipe(folder),
        environment=_environment(folder),
        rows=read_metrics(folder) if (folder / METRICS).exists() else [],
        samples=sample_files(folder),
        description=description,
        last_line=last_line,
        error=error,
        warnings=warnings,
    )


def read_samples(path: Path) -> list[Row]:
    """The responses of one step."""
    found = []
    for line in path.read_bytes().splitlines():
        try:
            found.append(json.loads(line))
        except (ValueError, RecursionError):
            continue
    return [row for row in found if isinstance(row, dict)]


def _environment(folder: Path) -> dict[str, Any]:
    try:
        found = recorded_environment(folder)
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _read_log(path: Path) -> tuple[str, str, str, list[tuple[str, int]]]:
    """The description of the run, the time of the last message, this if it is an error, the warnings and errors.

    Messages that differ only in numbers are of one kind.
    """
    if not path.exists():
        return "", "", "", []
    description, last_line, error = "", "", ""
    warnings: dict[str, tuple[str, int]] = {}
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            if not (match := _LINE.match(line.rstrip("\n"))):
                continue
            last_line, level, message = match.groups()
            if message.startswith("model: "):
                description = message
            elif part := _DESCRIPTION.search(message):
                description = f"{description}; {message}" if part[1] else message
            error = message if level in _ERRORS or message.startswith(SOLVED) else ""
            if level in _LOUD and not _IN_REPORT.match(message):
                kind = re.sub(r"\d+", "#", message)
                _, count = warnings.pop(kind, ("", 0))
                warnings[kind] = f"{level.lower()}: {message}", count + 1
    return description, last_line, error, list(warnings.values())
