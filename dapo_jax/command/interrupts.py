"""Host: Ctrl-C ends a command at any moment, with one line and exit code 130. Of the standard library alone.

A command's file calls `end_at_once` before its other imports, which take seconds: so this one imports as little as it
can. Where a command has begun what must be undone, it does so in `undone`. Importing this module changes nothing.
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
GRACE_S = 20.0  # in which a command undoes what it has begun
REPEATED_S = 1.0  # the same request arrives twice within it: launchers pass on what the terminal sends too
_PAUSE_S = 0.02
_AGAIN = 0  # the number of no signal
ENDING = "interrupted while it was ending"
SENTENCES = {  # command -> what becomes of its work
    "train": "rerun the same command to start, or to resume from the newest checkpoint",
    "evaluate": "the evaluation is incomplete and was not written; rerun the same command to measure again",
    "export": "the model is incomplete and was not written; rerun the same command to export it",
    "preflight": "there is no report; rerun the same command to compile again",
}


def sentence(command: str) -> str:
    """What an interrupted command says; `command` is the first of its arguments."""
    name = os.path.basename(command).removesuffix(".py")
    return f"interrupted: {SENTENCES.get(name, 'rerun the same command')}"


def end_at_once(command: str) -> None:
    """From now on Ctrl-C prints the sentence of `command` and ends this process there and then.

    Nothing changes where the process was started with SIGINT ignored, as shells start what runs in the background.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        _Interrupts(sentence(command))


@contextmanager
def undone() -> Iterator[None]:
    """Inside, Ctrl-C raises KeyboardInterrupt; the caller prints why it ends.

    A second Ctrl-C ends the process at once, and so do GRACE_S seconds. Nothing changes without `end_at_once` before,
    nor where another handler is in force.
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
        interrupts.message = None  # the caller has one
        if isinstance(error, Exception) and interrupts.raised_at is not None:  # as a library passes it on
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
    """Ends an interrupted command's process without what libraries do at its end; nothing without `end_at_once`."""
    if isinstance(getattr(signal.getsignal(signal.SIGINT), "__self__", None), _Interrupts):
        import logging

        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_CODE)


class _Interrupts:
    """Hears SIGINT twice: where Python does, between two bytecodes of the main thread, and in a thread of its own.

    The thread ends a process whose main thread stays inside a library. It raises again what is raised where Python
    can only ignore it: in `__del__`, or in the function that JAX has called by the garbage collector.
    """

    def __init__(self, message: str) -> None:
        self.message: str | None = message  # None: printed by the caller
        self.may_raise = False
        self.raised_at: float | None = None  # time.monotonic() of the first Ctrl-C
        self._own = 0  # signals that the thread has sent and not heard yet
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
        """Python's hook for exceptions that it must ignore."""
        if unraisable.exc_type is KeyboardInterrupt and self.raised_at is not None:
            self.raised_at = None
            os.write(self._write_end, bytes([_AGAIN]))
        else:
            self._report_ignored(unraisable)

    def _listen(self) -> None:
        """The thread."""
        first: float | None = None
        while True:
            left = None if first is None else max(first + GRACE_S - time.monotonic(), 0.0)
            if not select.select([self._read_end], [], [], left)[0]:
                self._end()
            heard = os.read(self._read_end, 1)[0]
            if getattr(signal.getsignal(signal.SIGINT), "__self__", None) is not self:
                continue  # another handler has taken the place of this
            if heard == _AGAIN:
                time.sleep(_PAUSE_S)  # until the main thread is somewhere else
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
        self._ending.acquire()  # of two threads that come here, one ends the process and the other waits for it
        if self.message is not None:
            os.write(2, f"dapo_jax: {self.message}\n".encode())
        os._exit(EXIT_CODE)
