"""Host: asyncio event loops that let their tasks end before they close.

Orbax closes its loop at the first array that it cannot read. The other reads would then print tracebacks, some of them
only when Python exits.
"""

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class _WholeLoop(asyncio.SelectorEventLoop):
    """Closes only after its tasks have ended. An interrupt waits for none, and leaves the loop open."""

    def close(self) -> None:
        error = sys.exc_info()[1]
        if error is not None and not isinstance(error, Exception):
            return
        while error is not None and not self.is_closed() and (tasks := asyncio.all_tasks(self)):
            self.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        super().close()


@contextmanager
def whole_loops() -> Iterator[None]:
    """Inside, every new event loop closes only after its tasks have ended."""
    before, asyncio.new_event_loop = asyncio.new_event_loop, _WholeLoop
    try:
        yield
    finally:
        asyncio.new_event_loop = before
