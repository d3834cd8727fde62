"""Host: wall-clock seconds of the stages of a step and of the whole run."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter
from typing import Any, Protocol

from dapo_jax.parallel.processes import waited


class Stage(Protocol):
    """A context manager that names the stage of the step inside it, for timers and the console."""

    def __call__(self, name: str, /) -> AbstractContextManager[Any]: ...


class StageTimers:
    """Sums the seconds of each named stage. Stages may repeat within a step and may nest.

    JAX returns before the device has finished, so a stage's time includes its device work only if the stage reads a
    result.

    Attributes:
        totals: seconds of each stage since the start of the run.
    """

    def __init__(self) -> None:
        self.totals: dict[str, float] = {}
        self._own: dict[str, float] = {}
        self._compiled = False  # whether a step is over
        self._step: dict[str, float] = {}

    @contextmanager
    def time(self, stage: str) -> Iterator[None]:
        """Adds the seconds of the `with` block to `stage`, even if the block raises."""
        start, before = perf_counter(), waited()
        try:
            yield
        finally:
            seconds = perf_counter() - start
            own = seconds - (waited() - before)
            for sums, found in ((self._step, seconds), (self.totals, seconds), (self._own, own)):
                sums[stage] = sums.get(stage, 0.0) + found

    def pop(self) -> dict[str, float]:
        """Returns the seconds of each stage since the last call as `timing_s/<stage>`, and resets them."""
        step, self._step = self._step, {}
        return {f"timing_s/{stage}": seconds for stage, seconds in step.items()}

    def pop_own(self) -> dict[str, float]:
        """The seconds of each stage since the last call in which this process did not wait for devices or others.

        Nothing in the first call: the first step compiles.
        """
        own, self._own = self._own if self._compiled else {}, {}
        self._compiled = True
        return own
