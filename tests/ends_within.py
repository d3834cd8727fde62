"""A limit for what hangs; far above what it takes on a machine that is busy, it measures no speed."""

import contextlib
import signal
from collections.abc import Iterator

from waiting import LIMIT_S


@contextlib.contextmanager
def ends_within(seconds: float = LIMIT_S) -> Iterator[None]:
    """Raises TimeoutError in the body, on the main thread, once it has run for so long."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"still running after {seconds} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
