"""Host: wall-clock seconds of the stages of a step and of the whole run."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter
from typing import Any, Protocol


class Stage(Protocol):
    """Names the stage of the step that runs inside it, for timers and the console."""

    def __call__(self, name: str, /) -> AbstractContextManager[Any]: ...


class StageTimers:
    """Sums the seconds of each named stage. Stages may repeat within a step and may nest.

    JAX returns before the device has finished: a stage's time is that of the device work only if the stage
    reads a result.

    Attributes:
        totals: seconds of each stage since the start of the run.
    """

    def __init__(self) -> None:
        self.totals: dict[str, float] = {}
        self._step: dict[str, float] = {}

    @contextmanager
    def time(self, stage: str) -> Iterator[None]:
        """Adds the seconds that the `with` block takes to `stage`, also if the block raises."""
        start = perf_counter()
        try:
            yield
        finally:
            seconds = perf_counter() - start
            for sums in (self._step, self.totals):
                sums[stage] = sums.get(stage, 0.0) + seconds

    def pop(self) -> dict[str, float]:
        """Returns the seconds of each stage since the last call, `timing_s/<stage>`, and resets them."""
        step, self._step = self._step, {}
        return {f"timing_s/{stage}": seconds for stage, seconds in step.items()}
