"""Host: a run's work directory: locked to one run, with a train.log that says why a run failed."""

import errno
import os
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from etils import epath

from dapo_jax.config.places import copy_of, is_address
from dapo_jax.errors import InputError
from dapo_jax.monitor.lock import locked
from dapo_jax.monitor.log import close_logging, log_failure, setup_logging
from dapo_jax.monitor.mirror import KIND, mirrored


def run_name(workdir: Path) -> str:
    """The name of a run: its folder's, for one of a sweep after its arm's: base/seed_0."""
    return "/".join(workdir.absolute().parts[-2 if re.fullmatch(r"seed_\d+", workdir.name) else -1 :])


@dataclass(frozen=True)
class Workdir:
    """An open work directory."""

    folder: Path  # on this machine
    upload: Callable[[str], None] = lambda name: None  # copies a file of it to permanent storage


@contextmanager
def open_workdir(
    workdir: str | os.PathLike[str], *, detailed: bool, also: Collection[str] = (), process: int = 0
) -> Iterator[Workdir]:
    """Creates and locks `workdir`, and logs the package's records to its train.log until the end.

    If the run fails, its traceback goes to train.log. For an address, the run writes to a copy on this machine.

    Args:
        detailed: show every log record on the console.
        also: names of loggers whose records the console always shows.
        process: index among the processes of a run. Those after the first neither lock nor write.

    Raises:
        InputError: another run holds the lock, or this process cannot write there.
    """
    with ExitStack() as stack:
        place = Workdir(Path(workdir))
        if is_address(str(workdir)):
            mirror = stack.enter_context(mirrored(str(workdir))) if process == 0 else None
            place = Workdir(copy_of(str(workdir), KIND), mirror.upload if mirror else place.upload)
        if process == 0:
            _prepare(place.folder)
            stack.enter_context(locked(epath.Path(place.folder)))
        setup_logging(place.folder, detailed=detailed, also=also, process=process)
        stack.callback(close_logging)
        try:
            yield place
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
        raise InputError(
            f"workdir={workdir} must be a directory that this process can create and write to ({error}): choose "
            "another by --config.workdir=DIR, or let this user write there"
        ) from error
