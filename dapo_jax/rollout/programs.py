"""Host: compiled programs by shape, compiled in the background before they are needed."""

import logging
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
from jax.sharding import Mesh

logger = logging.getLogger(__name__)


class Programs:
    """Programs compiled once, by key."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._thread: ThreadPoolExecutor | None = None  # one, since XLA compiles on several threads
        self._found: dict[Hashable, Future[Any]] = {}

    def prepare(self, key: Hashable, lower: Callable[[], jax.stages.Lowered]) -> None:
        """Starts to compile what `lower` returns, unless this key is known."""
        if key not in self._found:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="compile")
            self._found[key] = self._thread.submit(self._compile, key, lower)

    def get(self, key: Hashable, lower: Callable[[], jax.stages.Lowered]) -> Any:
        """The compiled program. Compiles it now if that has not begun, or has failed."""
        found = self._found.get(key)
        if found is None or found.cancel() or found.exception() is not None:
            compiled = self._compile(key, lower)
            self._found[key] = found = Future()
            found.set_result(compiled)
        return found.result()

    def close(self) -> None:
        """Drops what is still waiting to be compiled."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)

    def _compile(self, key: Hashable, lower: Callable[[], jax.stages.Lowered]) -> Any:
        start = time.perf_counter()
        try:
            with jax.set_mesh(self._mesh):
                compiled = lower().compile()
        except Exception:
            logger.warning("cannot compile %s", key, exc_info=True)
            raise
        logger.debug("compiled %s in %.1f s", key, time.perf_counter() - start)
        return compiled
