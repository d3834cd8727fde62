"""A limit for what would otherwise go on for minutes; far above what it takes, it measures no speed."""

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def ends_within(seconds: float) -> Iterator[None]:
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
