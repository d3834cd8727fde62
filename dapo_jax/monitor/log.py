"""Host: the package logger: every record to `train.log`, warnings and errors to the console."""

import logging
import os
import sys
from pathlib import Path

from tqdm import tqdm

_LOGGER = logging.getLogger("dapo_jax")
_FILE = "dapo_jax.file"
_CONSOLE = "dapo_jax.console"


class _ConsoleHandler(logging.Handler):
    """Writes to stderr above a progress bar instead of through it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.write(self.format(record), file=sys.stderr)
        except Exception:
            self.handleError(record)


def setup_logging(workdir: str | os.PathLike[str], *, detailed: bool) -> None:
    """Sends the records of the package from INFO upwards to `workdir/train.log` (appended) and the console.

    The console (stderr) shows warnings and errors, with `detailed` every record. Called again, it replaces
    the handlers of the call before and leaves those of others alone.
    """
    close_logging()
    Path(workdir).mkdir(parents=True, exist_ok=True)

    file = logging.FileHandler(Path(workdir) / "train.log", encoding="utf-8")
    file.name = _FILE
    file.setFormatter(logging.Formatter("[%(asctime)s] %(levelname)s: %(message)s", "%Y-%m-%d %H:%M:%S"))

    console = _ConsoleHandler(logging.NOTSET if detailed else logging.WARNING)
    console.name = _CONSOLE
    console.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))

    _LOGGER.addHandler(file)
    _LOGGER.addHandler(console)
    _LOGGER.setLevel(logging.INFO)
    _LOGGER.propagate = False  # absl puts a handler on the root logger: the console would show records twice


def close_logging() -> None:
    """Undoes `setup_logging`: closes its handlers and hands the records to the root logger again."""
    for handler in list(_LOGGER.handlers):
        if handler.name in (_FILE, _CONSOLE):
            _LOGGER.removeHandler(handler)
            handler.close()
    _LOGGER.setLevel(logging.NOTSET)
    _LOGGER.propagate = True
