"""Host: notices a step that hangs, logs where every thread of this process is, and ends the process if asked to."""

import faulthandler
import logging
import os
import statistics
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field

TIMES = 10  # a step hangs if it takes so many times the median of the steps before it
HUNG = 1  # exit code, with which a scheduler starts the run again
TOGETHER_S = 10  # in which other processes, which hang as well, log theirs: the first's end aborts them
_GRACE_S = 60  # for logging the stacks, after which the process ends without
_STDERR = 2
_MEASURED = 100  # steps that the median is of

logger = logging.getLogger(__name__)


@dataclass
class Watchdog:
    """Watches the time between `begin` and `end` of each step but the first of this process, which compiles.

    A step is sampling and updating; evaluations, records and checkpoints come after its `end`. It only watches: no
    result depends on it. It ends its process alone; the others hang as well, or notice the missing heartbeat.
    """

    minutes: float = 0.0  # that a step may take at least; 0 = nothing is watched
    ends: bool = False  # the process, with exit code HUNG
    patience_s: float = 0.0  # that a step may take longer, waiting for a judge
    _seconds: list[float] = field(default_factory=list)
    _began: float | None = None
    _timer: threading.Timer | None = None

    def begin(self, step: int) -> None:
        """A step begins."""
        self._began = time.monotonic()
        if self.minutes and self._seconds:
            limit = max(TIMES * statistics.median(self._seconds), 60 * self.minutes) + self.patience_s
            self._timer = threading.Timer(limit, self._report, (step, limit))
            self._timer.daemon = True
            self._timer.start()
            if self.ends:  # without the interpreter's lock or those of the log, which may be what hangs
                faulthandler.dump_traceback_later(limit + _GRACE_S, exit=True, file=_STDERR)

    def end(self, *, done: bool = False) -> None:
        """The step is `done`, or the run goes on with something else. Without a step it does nothing."""
        if self._timer is not None:
            self._timer.cancel()
            if self.ends:
                faulthandler.cancel_dump_traceback_later()
        if done and self._began is not None:
            self._seconds = [*self._seconds, time.monotonic() - self._began][-_MEASURED:]
        self._began = self._timer = None

    def _report(self, step: int, limit: float) -> None:
        text = "step %d has taken more than %.0f s (%d times the median, and monitor.watchdog_minutes=%g)%s; threads:"
        ending = "; this process ends (monitor.watchdog_ends): rerun the same command to resume" * self.ends
        try:
            logger.error(f"{text}\n%s", step, limit, TIMES, self.minutes, ending, _stacks())
        finally:  # a full disk may be why it hangs
            if self.ends:
                time.sleep(TOGETHER_S)
                os._exit(HUNG)


def _stacks() -> str:
    """Where each thread of this process is."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )
