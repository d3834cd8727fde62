"""Host: a run's work directory: one run at a time holds it, and its train.log says why the run failed."""

import errno
import fcntl
import logging
import os
import socket
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from dapo_jax.monitor.log import close_logging, log_failure, setup_logging

logger = logging.getLogger(__name__)


@contextmanager
def open_workdir(
    workdir: str | os.PathLike[str], *, detailed: bool, also: Collection[str] = (), process: int = 0
) -> Iterator[None]:
    """Creates and locks `workdir`, and sends the records of the package to its train.log until the end.

    If the run fails, its traceback goes to train.log. The system frees the lock when the process ends, however it does.

    Args:
        detailed: show every record on the console.
        also: names of loggers of which it shows every record in any case.
        process: index among the processes of a run. Those after the first neither lock nor write.

    Raises:
        ValueError: another run holds the directory, or this process cannot write there.
    """
    with ExitStack() as stack:
        if process == 0:
            stack.enter_context(_locked(Path(workdir)))
        setup_logging(workdir, detailed=detailed, also=also, process=process)
        stack.callback(close_logging)
        try:
            yield
        except (Exception, KeyboardInterrupt) as error:
            log_failure(error)
            raise


@contextmanager
def _locked(workdir: Path) -> Iterator[None]:
    """Holds the file `workdir`/lock, which names the process and the host of the run."""
    descriptor = _open_lock(workdir)  # closed in processes that this one starts, so that none of them keeps the lock
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(descriptor, 1000).decode(errors="replace").strip()
            raise ValueError(
                f"workdir={workdir} is held by another run ({holder or 'unknown process'}): wait for it, end it, or "
                "choose another directory by --config.workdir=DIR"
            ) from error
        except OSError as error:
            logger.warning("workdir=%s cannot be locked (%s): start no second run in it", workdir, error)
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        yield
    finally:
        os.close(descriptor)


def _open_lock(workdir: Path) -> int:
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        for path in (workdir, workdir / "train.log"):
            if path.exists() and not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return os.open(workdir / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ValueError(
            f"workdir={workdir} must be a directory that this process can make and write to ({error}): choose another "
            "by --config.workdir=DIR, or let this user write there"
        ) from error
