"""Host: the records of a run, named by its work directory or by the file itself."""

import json
from pathlib import Path
from typing import Any

from dapo_jax.errors import InputError

METRICS, LOG = "metrics.jsonl", "train.log"


def record_of(given: str | Path, *names: str) -> Path:
    """The file that is given, or the first of `names` that the work directory has.

    Raises InputError if there is none.
    """
    path = Path(given).expanduser()
    if path.is_file():
        return path
    if not path.exists():
        raise InputError(f"{given} does not exist: give the workdir of a run, or its {' or '.join(names)}")
    for name in names:
        if (path / name).is_file():
            return path / name
    raise InputError(f"{given} has no {' and no '.join(names)}: give the workdir of a run that has finished a step")


def metrics_of(path: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl; a last line that is cut off is left out. InputError if it is another file."""
    lines, rows = path.read_bytes().splitlines(), []  # bytes: the cut may go through a character
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            if number == len(lines) > 1:
                break
            raise InputError(f"{path}, line {number} is not JSON ({error}): give {METRICS} or its workdir") from error
        if not isinstance(row, dict) or "step" not in row:
            raise InputError(f"{path}, line {number} is no row of a step: give {METRICS} or its workdir")
        rows.append(row)
    return rows
