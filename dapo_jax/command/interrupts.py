"""Host: Ctrl-C ends a command at any moment, with one line and exit code 130.

A command calls `end_at_once` before its other imports, which take seconds, so this module imports only the standard
library, and little of it. Work that must be cleaned up runs inside `undone`. Importing this module changes nothing.
"""

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

EXIT_CODE = 130
GRACE_S = 20.0  # for a command to clean up
REPEATED_S = 1.0  # signals so close are one Ctrl-C: launchers forward what the terminal also sends
_PAUSE_S = 0.02
_AGAIN = 0  # not a signal's number
ENDING = "interrupted while it was ending"
SENTENCES = {  # command -> what happens to its work
    "train": "rerun the same command to start, or to resume from the newest checkpoint",
    "evaluate": "the evaluation is incomplete and was not written; rerun the same command to measure again",
    "export": "the model is incomplete and was not written; rerun the same command to export it",
    "preflight": "there is no report; rerun the same command to compile again",
}


def sentence(command: str) -> str:
    """What an interrupted command prints; `command` is the first of its arguments."""
    name = os.path.basename(command).removesuffix(".py")
    return f"interrupted: {SENTENCES.get(name, 'rerun the same command')}"


def end_at_once(command: str) -> None:
    """From now on Ctrl-C prints the sentence of `command` and ends this process immediately.

    Nothing changes if the process was started with SIGINT ignored, as shells do for background jobs.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        _Interrupts(sentence(command))


@contextmanager
def undone() -> Iterator[None]:
    """Inside, Ctrl-C raises KeyboardInterrupt, and the caller prints the message.

    A second Ctrl-C ends the process at once, and so does a cleanup longer than GRACE_S seconds. Nothing changes unless
    `end_at_once` was called before, or if another handler has been installed since.
    """
    interrupts = getattr(signal.getsignal(signal.SIGINT), "__self__", None)
    if not isinstance(interrupts, _Interrupts):
        yield
        return
    outer, interrupts.may_raise = interrupts.may_raise, True
    try:
        yield
        with suppress(OSError, ValueError):  # a closed stdout is reported at the end
            sys.stdout.flush()
    except BaseException as error:
        interrupts.message = None  # the caller prints one
        if isinstance(error, Exception) and interrupts.raised_at is not None:  # a library has wrapped it
            raise KeyboardInterrupt from error
        raise
    else:
        if not outer:
            interrupts.message = ENDING
        if interrupts.raised_at is not None:  # a library has swallowed it
            raise KeyboardInterrupt
    finally:
        interrupts.may_raise = outer


def finish() -> None:
    """Ends an interrupted command's process without running exit handlers. Does nothing without `end_at_once`."""
    if isinstance(getattr(signal.getsignal(signal.SIGINT), "__self__", None), _Interrupts):
        import logging

        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_CODE)


class _Interrupts:
    """Receives SIGINT twice: in Python's handler, between two bytecodes of the main thread, and in a thread of its own.

    The thread ends a process whose main thread is stuck inside a library. It sends the signal again if Python had to
    ignore the exception: raised in `__del__`, or in a callback that JAX registers with the garbage collector.
    """

    def __init__(self, message: str) -> None:
        self.message: str | None = message  # None: printed by the caller
        self.may_raise = False
        self.raised_at: float | None = None  # time.monotonic() of the first Ctrl-C
        self._own = 0  # signals that the thread has sent but not received yet
        self._ending = threading.Lock()
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        signal.signal(signal.SIGINT, self._receive)
        signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        self._report_ignored, sys.unraisablehook = sys.unraisablehook, self._ignored
        threading.Thread(target=self._listen, name="interrupts", daemon=True).start()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        """Python's handler, on the main thread."""
        if self.raised_at is not None and time.monotonic() < self.raised_at + REPEATED_S:
            return
        if not self.may_raise or self.raised_at is not None:
            self._end()
        self.raised_at = time.monotonic()
        raise KeyboardInterrupt

    def _ignored(self, unraisable: "sys.UnraisableHookArgs") -> None:
        """Python's hook for exceptions that it cannot raise."""
        if unraisable.exc_type is KeyboardInterrupt and self.raised_at is not None:
            self.raised_at = None
            os.write(self._write_end, bytes([_AGAIN]))
        else:
            self._report_ignored(unraisable)

    def _listen(self) -> None:
        """The thread's loop."""
        first: float | None = None
        while True:
            left = None if first is None else max(first + GRACE_S - time.monotonic(), 0.0)
            if not select.select([self._read_end], [], [], left)[0]:
                self._end()
            heard = os.read(self._read_end, 1)[0]
            if getattr(signal.getsignal(signal.SIGINT), "__self__", None) is not self:
                continue  # another handler has replaced this one
            if heard == _AGAIN:
                time.sleep(_PAUSE_S)  # so that the main thread is elsewhere
                self._own += 1
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            elif heard == signal.SIGINT and self._own:
                self._own -= 1
            elif heard == signal.SIGINT:
                now = time.monotonic()
                if first is None and (self.may_raise or self.raised_at is not None):
                    first = now
                elif first is None or now >= first + REPEATED_S:
                    self._end()

    def _end(self) -> None:
        self._ending.acquire()  # only one thread ends the process; a second one waits here
        if self.message is not None:
            os.write(2, f"dapo_jax: {self.message}\n".encode())
        os._exit(EXIT_CODE)
