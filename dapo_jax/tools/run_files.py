"""Host: the records of a run, named by its work directory or by the file itself."""

from pathlib import Path
from typing import Any

from dapo_jax.errors import InputError
from dapo_jax.monitor.records import METRICS, read_rows


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
    try:
        rows = read_rows(path)
    except RuntimeError as error:
        raise InputError(f"{error}, or give {METRICS} or its workdir") from error
    if not rows and path.stat().st_size:
        raise InputError(f"{path} does not hold rows of steps: give {METRICS} or its workdir")
    return rows
