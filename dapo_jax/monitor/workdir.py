"""Host: a run's work directory: one run at a time holds it, and its train.log says why the run failed."""

import errno
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from dapo_jax.monitor.lock import locked
from dapo_jax.monitor.log import close_logging, log_failure, setup_logging


@contextmanager
def open_workdir(workdir: str | os.PathLike[str], *, detailed: bool, process: int = 0) -> Iterator[None]:
    """Creates and locks `workdir`, and sends the records of the package to its train.log until the end.

    If the run fails, its traceback goes to train.log.

    Args:
        detailed: show every record on the console.
        process: index among the processes of a run. Those after the first neither lock nor write.

    Raises:
        ValueError: another run holds the directory, or this process cannot write there.
    """
    with ExitStack() as stack:
        if process == 0:
            _prepare(Path(workdir))
            stack.enter_context(locked(Path(workdir)))
        setup_logging(workdir, detailed=detailed, process=process)
        stack.callback(close_logging)
        try:
            yield
        except (Exception, KeyboardInterrupt) as error:
            log_failure(error)
            raise


def _prepare(workdir: Path) -> None:
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        for path in (workdir, workdir / "train.log"):
            if path.exists() and not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ValueError(
            f"workdir={workdir} must be a directory that this process can make and write to ({error}): choose another "
            "by --config.workdir=DIR, or let this user write there"
        ) from error
