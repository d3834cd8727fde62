"""Host: stops a run on request at its next safe point, the same one in all processes."""

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

import jax

from dapo_jax.parallel.processes import any_process, waiting

IN_FLIGHT = 2  # micro-batches that the host may be ahead of the devices
_REPEATED_S = 1.0  # a second signal within this time is the same request
_CHECKS_PER_AGREEMENT = 8  # with several processes, which must agree to stop
_LONG_S = 0.5  # if checks are further apart, the processes agree at every check


class Stopped(BaseException):
    """A signal asked the run to stop, and it has stopped at a safe point. This is not an error."""


class StopRequest:
    """SIGTERM (from schedulers and cloud maintenance) and SIGINT (Ctrl-C) ask a run to stop.

    The first signal is remembered until a safe point. A second one, at least a second later (launchers send one
    twice), ends the process at once, by that signal; where Python's own handler was, as in a notebook, SIGINT raises
    KeyboardInterrupt instead. Before the first safe point there is nothing to save: SIGTERM then stops a single process
    immediately and kills one of several, and SIGINT is left to the command. Outside the main thread, where Python
    delivers no signals, nothing asks the run to stop.
    """

    def __init__(self) -> None:
        self._signal: str | None = None
        self._since = 0.0  # time.monotonic() of the first signal
        self._set_up = False
        self._patience: Callable[[], float] | None = None  # None outside `safe`
        self._checks = 0  # since the processes last agreed
        self._interval = _CHECKS_PER_AGREEMENT
        self._agreed_at = time.monotonic()
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._hear(signal.SIGTERM)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @contextmanager
    def safe(self, patience: Callable[[], float] = lambda: 0.0) -> Iterator[None]:
        """Inside, `check` may raise: the work in progress can be discarded.

        Args:
            patience: gives the seconds after the signal during which `check` does not raise; called by each check.
        """
        self._hear(signal.SIGINT)
        self._set_up, self._patience = True, patience
        try:
            yield
        finally:
            self._patience = None

    def check(self, *, agree: bool = False) -> None:
        """A possible safe point, which all processes reach equally often.

        Args:
            agree: ask the other processes now, not only at every few checks.

        Raises:
            Stopped: inside `safe`, after any process was asked to stop.
        """
        if self._patience is None:
            return
        asked = self._signal is not None and time.monotonic() >= self._since + self._patience()
        if jax.process_count() > 1:
            self._checks += 1
            asked = (agree or self._checks >= self._interval) and self._agree(asked)
        if asked:
            raise Stopped(f"stopped by {self._signal or 'a signal to another process'}")

    def _hear(self, number: signal.Signals) -> None:
        if threading.current_thread() is threading.main_thread() and number not in self._previous:
            self._previous[number] = signal.signal(number, self._receive)

    def _agree(self, asked: bool) -> bool:
        """Whether any process was asked to stop. All of them choose the same number of checks until the next time."""
        now = time.monotonic()
        asked, long = any_process(asked, now - self._agreed_at >= _LONG_S * self._checks)
        self._interval = 1 if long else _CHECKS_PER_AGREEMENT
        self._checks, self._agreed_at = 0, now
        return asked

    def _receive(self, number: int, _: FrameType | None) -> None:
        if self._signal is not None and time.monotonic() < self._since + _REPEATED_S:
            return
        name = signal.Signals(number).name
        if self._signal is not None or (not self._set_up and jax.process_count() > 1):
            if self._previous.get(signal.Signals(number)) is signal.default_int_handler:
                raise KeyboardInterrupt  # in a notebook or a program: not the end of its process
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._signal, self._since = name, time.monotonic()
        if not self._set_up:
            raise Stopped(f"stopped by {name} before the first step")


class Pace:
    """Keeps the host at most IN_FLIGHT micro-batches ahead of the devices, so that it can stop between two of them."""

    def __init__(self, check: Callable[[], None]) -> None:
        """
        Args:
            check: a possible safe point, such as StopRequest.check.
        """
        self._check = check
        self._in_flight: deque[Any] = deque()

    def __call__(self, result: Any) -> None:
        """Call it after dispatching a micro-batch. No later one may overwrite (donate) `result`."""
        self._in_flight.append(result)
        if len(self._in_flight) > IN_FLIGHT:
            with waiting():
                jax.block_until_ready(self._in_flight.popleft())
        self._check()


def unpaced(result: Any) -> None:
    """Instead of a Pace while other devices sample: the host must not wait."""
