"""Host: the package logger: every record to `train.log`, warnings and errors to the console."""

import logging
import os
import re
import sys
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from tqdm import tqdm

from dapo_jax.errors import printable

_LOGGER = logging.getLogger("dapo_jax")
LOG, _DISCARDED = "train.log", "train.discarded.log"


class _Formatter(logging.Formatter):
    """What a record quotes may come from a model, a file or another process."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


class _ConsoleHandler(logging.Handler):
    """Writes to stderr above a progress bar, without breaking it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.write(self.format(record), file=sys.stderr)
        except Exception:
            self.handleError(record)


class _FileHandler(logging.FileHandler):
    """Lets a full disk end the run, instead of printing a traceback per record."""

    def __init__(self, path: Path) -> None:
        self.bytes_at_start = path.stat().st_size if path.exists() else 0
        super().__init__(path, encoding="utf-8")

    def reopen(self) -> None:
        """Continues in the file that has the name now."""
        before, self.stream = self.stream, self._open()
        if before is not None:
            before.close()

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        if isinstance(sys.exception(), OSError):
            raise
        super().handleError(record)


def setup_logging(
    workdir: str | os.PathLike[str], *, detailed: bool, also: Collection[str] = (), process: int = 0
) -> None:
    """Sends the package's records from INFO upwards to `workdir/train.log` (appended) and the console.

    The console (stderr) shows warnings and errors; with `detailed`, every record. A second call replaces the handlers
    of the first and leaves all others alone.

    Args:
        also: names of loggers whose records the console always shows.
        process: index among the processes of a run. Those after the first write no file, only their warnings to the
            console, with their index.
    """
    close_logging()
    if process:
        _add_console(logging.WARNING, f"process {process}: %(levelname)s: %(message)s")
        return
    Path(workdir).mkdir(parents=True, exist_ok=True)

    file = _FileHandler(Path(workdir) / LOG)
    file.setFormatter(_Formatter("[%(asctime)s] %(levelname)s: %(message)s", "%Y-%m-%d %H:%M:%S"))

    _LOGGER.addHandler(file)
    _add_console(logging.NOTSET if detailed else logging.WARNING, "%(levelname)s: %(message)s", also)


def _add_console(level: int, form: str, also: Collection[str] = ()) -> None:
    console = _ConsoleHandler()
    console.addFilter(lambda record: record.levelno >= level or record.name in also)
    console.setFormatter(_Formatter(form))
    _LOGGER.addHandler(console)
    _LOGGER.setLevel(logging.INFO)
    _LOGGER.propagate = False  # absl adds a handler to the root logger, which would show records twice


def log_failure(error: BaseException) -> None:
    """Writes the traceback of `error` only to train.log, if it is open: the console shows a message instead."""
    about = type(error), error, error.__traceback__
    record = _LOGGER.makeRecord(_LOGGER.name, logging.ERROR, "", 0, "the run ends: %s", (error,), about)
    for handler in _LOGGER.handlers:
        if isinstance(handler, _FileHandler):
            with suppress(OSError):  # the disk may be what failed
                handler.handle(record)


def log_bytes(workdir: str | os.PathLike[str]) -> int:
    """The size of train.log; 0 if there is none."""
    path = Path(workdir) / LOG
    return path.stat().st_size if path.exists() else 0


def rewind_log(workdir: str | os.PathLike[str], size: int) -> None:
    """Moves the INFO lines that earlier starts wrote after the first `size` bytes of train.log to train.discarded.log.

    A run that repeats those steps then logs each of their rounds once, as in metrics.jsonl. Warnings, errors and the
    lines of this start stay. Nothing happens if `size` is negative or the log has not grown.
    """
    path = Path(workdir) / LOG
    handler = next((handler for handler in _LOGGER.handlers if isinstance(handler, _FileHandler)), None)
    if handler is None or not 0 <= size < handler.bytes_at_start:
        return
    written = path.read_bytes()
    moved, kept = [], [written[:size]]
    into = moved
    for line in written[size : handler.bytes_at_start].splitlines(keepends=True):
        if level := re.match(rb"\[[^]]*\] (\w+): ", line):  # a traceback's lines belong to the record before
            into = moved if level[1] == b"INFO" else kept
        into.append(line)
    with open(path.with_name(_DISCARDED), "ab") as discarded:
        discarded.write(b"".join(moved))
        os.fsync(discarded.fileno())
    rest = path.with_name(f"{LOG}.tmp")
    rest.write_bytes(b"".join([*kept, written[handler.bytes_at_start :]]))
    os.replace(rest, path)
    handler.reopen()


def close_logging() -> None:
    """Undoes `setup_logging`: closes its handlers and passes records to the root logger again."""
    for handler in list(_LOGGER.handlers):
        if isinstance(handler, _FileHandler | _ConsoleHandler):
            _LOGGER.removeHandler(handler)
            with suppress(OSError):  # a failure to write has been reported already
                handler.close()
    _LOGGER.setLevel(logging.NOTSET)
    _LOGGER.propagate = True
