"""Waits for what another process or thread does; the limit is met by what hangs alone, however slow the machine is."""

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")
LIMIT_S = 600.0


def wait_until(condition: Callable[[], Found], what: str = "what was waited for") -> Found:
    """What `condition` returns once that is true. Fails after LIMIT_S."""
    deadline = time.monotonic() + LIMIT_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} has not come after {LIMIT_S:.0f} s"
        time.sleep(0.02)
    return found
