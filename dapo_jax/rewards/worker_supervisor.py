"""Host: the process between the pool and a worker. It ends all that the worker started, and bounds what that prints.

It runs none of the verifier's code. It is the parent of the worker, and on Linux also adopts what the worker's children
leave behind, so that nothing escapes by leaving its session or by clearing its environment.
"""

import ctypes
import os
import resource
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

from dapo_jax.errors import printable

MAX_PRINTED = 1 << 20  # bytes that a worker and its children may print
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # of prctl (Linux)
_HEARD = (signal.SIGTERM, signal.SIGCHLD)


def fork_worker(connection: int) -> None:
    """Returns in a new process, the worker. This one supervises it, and ends with its exit code; SIGTERM kills it.

    Args:
        connection: file descriptor that only the worker keeps.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # the thread of the pool that started this process has ended
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
    read_end, write_end = os.pipe()
    worker = os.fork()
    if worker == 0:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.dup2(write_end, 1)
        os.dup2(write_end, 2)
        os.close(read_end)
        os.close(write_end)
        return
    os.close(connection)
    os.close(write_end)
    printer = threading.Thread(target=_pass_on, args=(read_end,), daemon=True)
    printer.start()
    exit_code = os.waitstatus_to_exitcode(_wait(worker))
    _end_children()
    printer.join(1.0)
    if exit_code < 0:
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-exit_code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [-exit_code])  # no other: the pool may have sent SIGTERM meanwhile
        os.kill(os.getpid(), -exit_code)
    os._exit(exit_code)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def _wait(worker: int) -> int:
    """The status with which the worker ends. SIGTERM kills it."""
    while True:
        if signal.sigwait(_HEARD) == signal.SIGTERM:
            os.kill(worker, signal.SIGKILL)
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == worker:
                return ended[1]


def _end_children() -> None:
    """Kills what is left: orphans of the worker, then theirs."""
    with suppress(ChildProcessError):  # there are no more
        while True:
            for child in _children():
                os.kill(child, signal.SIGKILL)
            os.waitpid(-1, 0)


def _children() -> list[int]:
    own, found = str(os.getpid()), []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has exited
            if status.read_text().rpartition(")")[2].split()[1] == own:
                found.append(int(status.parent.name))
    return found


def _pass_on(read_end: int) -> None:
    """Prints on stderr what the worker prints, up to MAX_PRINTED bytes."""
    left = MAX_PRINTED
    while part := os.read(read_end, 1 << 16):
        if left > 0:
            text = printable(part[:left].decode("utf-8", "replace"))
            left -= len(part)
            text += "" if left > 0 else "\ndapo_jax: a verifier process has printed over 1 MiB: the rest is dropped\n"
            with suppress(OSError):  # nobody reads
                os.write(2, text.encode())
