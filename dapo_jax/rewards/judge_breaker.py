"""Host: slows the threads that ask a judge to one request at a time while it does not answer, and ends their wait."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from dapo_jax.rewards.judge_client import RequestFailed

BROKEN_AFTER = 8  # failures that may pass, in a row, of all threads of a process
MAX_PROBE_WAIT_S = 60.0  # between two requests to a judge that does not answer
_WARN_EVERY_S = 60.0

_log = logging.getLogger(__name__)


class Breaker:
    """Counts failures in a row that may pass. After BROKEN_AFTER one request at a time probes, until one is answered.

    The others wait instead of using up their retries. Each wait between two probes is twice as long as the last.
    """

    def __init__(self, judge: str, *, patience_s: float, wait_s: float) -> None:
        """
        Args:
            judge: its name in messages.
            patience_s: seconds of probing, after which no request may begin.
            wait_s: before the first probe.
        """
        self._judge, self._patience_s, self._wait_s = judge, patience_s, wait_s
        self._changed = threading.Condition()
        self._failures = self._failed_probes = 0  # in a row
        self._broken_at: float | None = None  # None: it answers; as the next two, of time.monotonic()
        self._probe_at, self._warned_at = 0.0, -_WARN_EVERY_S
        self._probing = self._lost = self._stopped = False

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Waits until a request may begin, which the body makes.

        Raises:
            RequestFailed: by the body; or `stop` was called.
            RuntimeError: the judge has not answered for patience_s.
        """
        probes = self._begin()
        try:
            yield
            self._answered()
        except RequestFailed as failure:
            if failure.again:
                self._failed(failure, probes)
            else:
                self._answered()
            raise
        finally:
            if probes:
                with self._changed:
                    self._probing = False
                    self._changed.notify_all()

    def stop(self) -> None:
        """Ends all waits."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _begin(self) -> bool:
        """Waits for a turn. Whether it is a probe."""
        with self._changed:
            while self._broken_at is not None and not self._stopped:
                if self._lost:
                    raise RuntimeError(
                        f"{self._judge} has not answered for reward.judge.patience_s={self._patience_s:g} s: see that "
                        "it runs, then rerun the same command (answers so far are kept)"
                    )
                left = self._probe_at - time.monotonic()
                if left <= 0 and not self._probing:
                    self._probing = True
                    return True
                self._changed.wait(None if self._probing else left)
            if self._stopped:
                raise RequestFailed("the run ended")
            return False

    def _failed(self, failure: RequestFailed, probes: bool) -> None:
        with self._changed:
            self._failures += 1
            self._failed_probes += probes
            if self._failures < BROKEN_AFTER:
                return
            now = time.monotonic()
            if self._broken_at is None:
                self._broken_at = now
                warns = now >= self._warned_at + _WARN_EVERY_S
                self._warned_at = now if warns else self._warned_at
                _log.log(
                    logging.WARNING if warns else logging.INFO,
                    "%s fails: %d failures in a row, the last with %s. It is asked one request at a time until it "
                    "answers; after reward.judge.patience_s=%g s the run ends",
                    *(self._judge, self._failures, failure, self._patience_s),
                )
            end = self._broken_at + self._patience_s
            wait = min(self._wait_s * 2.0 ** min(self._failed_probes, 30), MAX_PROBE_WAIT_S)
            self._probe_at = min(now + max(wait, failure.wait_s), max(end, now))  # the last probe is at the end
            self._lost = self._lost or (probes and now >= end)

    def _answered(self) -> None:
        with self._changed:
            self._failures = self._failed_probes = 0
            if self._broken_at is not None:
                _log.info("%s answers again after %.0f s", self._judge, time.monotonic() - self._broken_at)
                self._broken_at = None
                self._changed.notify_all()
