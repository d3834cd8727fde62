"""Host: the lock of a work directory, which a successor can take over from a dead process or machine.

Of the files lock.1, lock.2, ... in the directory, the newest is the lock. Only one process can create the next file,
once the holder has released the lock or ended. On the same machine, flock tells at once whether the holder lives.
Between machines flock is unreliable: a file system may not share it, or its server may keep the lock of a dead machine
(NFS). So a holder rewrites its file every BEAT_S, and a successor on another machine watches the file for
DEAD_AFTER_S: its content, not its time, since clocks differ. Buckets have no flock, so there only the watching counts.
"""

import fcntl
import json
import logging
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import fsspec
from etils import epath

from dapo_jax.config.places import is_address
from dapo_jax.errors import InputError, say

BEAT_S = 5.0  # seconds between two heartbeats of a holder
DEAD_AFTER_S = 60.0  # seconds without a heartbeat after which another machine takes over the lock
_BYTES = 400  # size of a lock file, always the same, so that one write replaces all of it

logger = logging.getLogger(__name__)


@contextmanager
def locked(workdir: epath.Path) -> Iterator[None]:
    """Holds the lock of `workdir`. A process that has lost it, because it was stopped for long, ends at once.

    Raises:
        InputError: another living run holds it.
    """
    number, descriptor = _take(workdir)
    ended = threading.Event()
    heart = threading.Thread(target=_beat, args=(workdir, number, ended), name="lock of the workdir", daemon=True)
    try:
        heart.start()
        yield
    finally:
        ended.set()
        heart.join(BEAT_S)  # it may still wait for a file system that does not answer
        with suppress(Exception):  # a store's client can raise anything; a successor then watches the lock
            _write(_file(workdir, number), _text({"released": True}))
        if descriptor is not None:
            os.close(descriptor)


def _take(workdir: epath.Path) -> tuple[int, int | None]:
    """The number of the lock that this process has created, and its open file, which holds the flock."""
    before = max(_numbers(workdir), default=0)
    if before:
        _wait_for_end(workdir, before)
    path = _file(workdir, before + 1)
    try:
        descriptor = _create(path, _text(_self()))
    except FileExistsError:
        _refuse(workdir, _read(path))
    newest = max(_numbers(workdir))
    if newest != before + 1:  # the directory was read too long ago
        path.unlink()
        if descriptor is not None:
            os.close(descriptor)
        _refuse(workdir, _read(_file(workdir, newest)))
    for number in _numbers(workdir):
        if number < newest:
            _file(workdir, number).unlink(missing_ok=True)
    return newest, descriptor


def _wait_for_end(workdir: epath.Path, number: int) -> None:
    """Returns once the holder of that lock is known to have ended. InputError if it lives."""
    path = _file(workdir, number)
    text = _read(path)
    holder = _parsed(text)
    if holder is None or "released" in holder:
        return
    if holder.get("machine") == _machine():
        is_free = None if is_address(str(path)) else _is_free(path)
        if is_free:
            return
        if is_free is False and _exists(holder["process"]):
            _refuse(workdir, text, f", last heartbeat {max(time.time() - path.stat().mtime, 0):.0f} s ago")
    logger.warning(
        "workdir=%s is locked by %s: waiting up to %.0f s for a heartbeat", workdir, _name(text), DEAD_AFTER_S
    )
    pause = min(BEAT_S, DEAD_AFTER_S) / 5
    for _ in range(round(DEAD_AFTER_S / pause)):  # counts checks, not seconds: a server that is down stops both
        time.sleep(pause)
        now = _read(path)
        found = _parsed(now)
        if found is None or "released" in found:
            return
        if now != text:
            _refuse(workdir, now, ", last heartbeat just now")
    logger.warning(
        "workdir=%s is taken over from %s, which gave no heartbeat for %.0f s", workdir, _name(text), DEAD_AFTER_S
    )


def _beat(workdir: epath.Path, number: int, ended: threading.Event) -> None:
    """Writes heartbeats until `ended`; ends the process if another one has taken over the lock."""
    beats, failing = 0, False
    while not ended.wait(BEAT_S):
        beats += 1
        try:
            newest = max(_numbers(workdir), default=0)
            if newest == number:
                _write(_file(workdir, number), _text({**_self(), "beats": beats}))
                failing = False
                continue
        except FileNotFoundError:
            newest = 0
        except Exception as error:  # as above
            if not failing:
                logger.warning("workdir=%s cannot be written to (%s): trying again", workdir, error)
            failing = True
            continue
        if ended.is_set():
            return
        taker = "another process"
        with suppress(Exception):
            taker = _name(_read(_file(workdir, newest)))
        found = f"is now locked by {taker}" if newest > number else "has lost its lock"
        say(
            f"dapo_jax: workdir={workdir} {found}: this process gave no heartbeat for {DEAD_AFTER_S:.0f} s, or its "
            "lock was removed, so it ends without saving",
            file=sys.stderr,
        )
        os._exit(1)


def _numbers(workdir: epath.Path) -> list[int]:
    names = [path.name for path in workdir.iterdir()] if workdir.exists() else []
    return [int(name.removeprefix("lock.")) for name in names if name.startswith("lock.") and name[5:].isdigit()]


def _file(workdir: epath.Path, number: int) -> epath.Path:
    return workdir / f"lock.{number}"


def _self() -> dict[str, Any]:
    return {"process": os.getpid(), "host": socket.gethostname(), "machine": _machine(), "beats": 0}


def _machine() -> str:
    """One name for all containers of a machine; it changes when the machine restarts."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"{uuid.getnode():x}"


def _text(values: dict[str, Any]) -> bytes:
    return json.dumps(values).encode()[: _BYTES - 1].ljust(_BYTES - 1) + b"\n"


def _create(path: epath.Path, text: bytes) -> int | None:
    """The open file that only this process has created. FileExistsError if another was first."""
    if is_address(str(path)):
        fsspec.filesystem("gcs").pipe_file(str(path), text, mode="create")
        return None
    # Child processes do not inherit the descriptor, so none of them keeps the lock.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        _flock(descriptor)  # before the file names its holder
        os.write(descriptor, text)
    except BaseException:
        path.unlink()
        os.close(descriptor)
        raise
    return descriptor


def _write(path: epath.Path, text: bytes) -> None:
    """Writes an existing file. FileNotFoundError if it is gone: opening it asks the server."""
    if is_address(str(path)):
        path.write_bytes(text)
        return
    with open(path, "r+b", buffering=0) as file:
        file.write(text)


def _read(path: epath.Path) -> bytes | None:
    """The content of the file as its server has it: opening it asks. None if it is gone."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _parsed(text: bytes | None) -> dict[str, Any] | None:
    """None for a file that is gone, {} for one without content yet."""
    with suppress(ValueError):
        values = json.loads(text or b"{}")
        return None if text is None else values if isinstance(values, dict) else {}
    return {}


def _is_free(path: epath.Path) -> bool | None:
    """Whether no process holds the file's flock; None if the file system has no flock."""
    try:
        with open(path, "r+b") as file:
            return _flock(file.fileno())
    except OSError:  # it belongs to another user
        return None


def _flock(descriptor: int) -> bool | None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _name(text: bytes | None) -> str:
    holder = _parsed(text) or {}
    return f"process {holder['process']} on {holder['host']}" if "process" in holder else "a process that is starting"


def _refuse(workdir: epath.Path, text: bytes | None, heartbeat: str = "") -> NoReturn:
    raise InputError(
        f"workdir={workdir} is locked by another run ({_name(text)}{heartbeat}): wait for it, end it, or choose "
        "another directory by --config.workdir=DIR"
    )
