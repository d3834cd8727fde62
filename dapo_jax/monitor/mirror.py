"""Host: a work directory in a bucket: the run writes to a copy on this machine, and changes are uploaded.

A bucket cannot append to a file; it replaces whole objects. So metrics.jsonl is uploaded at each step, before its
checkpoint, and everything else once a minute and at the end.
"""

import logging
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from etils import epath

from dapo_jax.config.places import copy_of, place_of
from dapo_jax.monitor.lock import locked

UPLOAD_S = 60.0  # seconds between two uploads of changed files
KIND = "workdirs"  # of copies
CHECKPOINTS = "checkpoints"  # these are written to the bucket directly

logger = logging.getLogger(__name__)


class Mirror:
    """A copy, in `folder`, of the records at `address`."""

    def __init__(self, address: str) -> None:
        self._place, self.folder = place_of(address), copy_of(address, KIND)
        self._turn = threading.Lock()
        shutil.rmtree(self.folder, ignore_errors=True)
        for file in _files(self._place):
            path = self.folder / str(file).removeprefix(f"{self._place}/")
            path.parent.mkdir(parents=True, exist_ok=True)
            file.copy(path)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._sent = self._states()  # size and time of each file that the bucket has

    def upload(self, name: str | None = None) -> None:
        """Makes the bucket hold what the folder holds, or only uploads the file called `name`."""
        with self._turn:
            states = self._states()
            changed = [one for one, state in states.items() if self._sent.get(one) != state and name in (None, one)]
            for one in changed:
                epath.Path(self.folder / one).copy(self._place / one, overwrite=True)
                self._sent[one] = states[one]
            for one in [] if name else self._sent.keys() - states.keys():
                (self._place / one).unlink(missing_ok=True)
                del self._sent[one]

    def _states(self) -> dict[str, tuple[int, int]]:
        states = {}
        for path in self.folder.rglob("*"):
            with suppress(FileNotFoundError):  # another program removed it meanwhile
                if path.is_file() and not _is_own(path.name):
                    stat = path.stat()
                    states[str(path.relative_to(self.folder))] = stat.st_size, stat.st_mtime_ns
        return states


@contextmanager
def mirrored(address: str) -> Iterator[Mirror]:
    """Locks the work directory at `address` and keeps it equal to its copy on this machine until the end.

    Raises:
        InputError: another run holds the lock.
    """
    place = place_of(address)
    place.mkdir(parents=True, exist_ok=True)
    with locked(place):
        mirror, ended = Mirror(address), threading.Event()

        def try_to_upload(then: str) -> None:
            try:
                mirror.upload()
            except Exception as error:  # a store's client can raise anything
                logger.warning("workdir=%s: the records could not be uploaded (%s): %s", address, error, then)

        def keep_uploading() -> None:
            while not ended.wait(UPLOAD_S):
                try_to_upload("trying again")

        uploads = threading.Thread(target=keep_uploading, name="upload of the workdir", daemon=True)
        uploads.start()
        try:
            yield mirror
        finally:
            ended.set()
            uploads.join()
            try_to_upload(f"they are in {mirror.folder}")


def _is_own(name: str) -> bool:
    """Whether a file is only for this machine."""
    return name.startswith("lock.") or name.endswith(".tmp")


def _files(place: epath.Path) -> Iterator[epath.Path]:
    for one in place.iterdir():
        if one.is_dir():
            if one.name != CHECKPOINTS:
                yield from _files(one)
        elif not _is_own(one.name):
            yield one
