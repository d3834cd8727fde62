"""Host: wall-clock seconds of the stages of a step and of the whole run; whether a process keeps the others waiting."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter
from typing import Any

from dapo_jax.monitor.statistics import TRAINING_STAGES
from dapo_jax.parallel.processes import waited

COMPARED = {  # between processes: the stages of each part
    "sampling": ("gen",),
    "rewards": ("reward", "shape", "filter"),
    "update": ("batch", *TRAINING_STAGES),
}
# Names the stage of the step inside a `with` block, for timers and the console.
Stage = Callable[[str], AbstractContextManager[Any]]
_LEAST_S = 1.0  # less counts as this: the quotient of short times means nothing


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


def own_seconds(stages: Mapping[str, float]) -> list[float]:
    """A process's own seconds of COMPARED, from those of the timers (StageTimers.pop_own)."""
    return [sum(stages.get(name, 0.0) for name in names) for names in COMPARED.values()]


def slowest_process(seconds: Sequence[Sequence[float]]) -> dict[str, float]:
    """Metrics `time/slowest_process/`: the longest own time of any process over the median one (of two, the shorter);
    and `time/slowest_process`, the process with the longest own time of all COMPARED.

    Own seconds are the host's work: waiting for its verifiers, preparing, dispatching. Waits for devices and for other
    processes are left out, as all processes wait for the slowest. So a slow device does not show: every host waits for
    it equally long.

    Args:
        seconds: [processes][COMPARED] own seconds of a step, gathered. One process has no metrics.
    """
    if len(seconds) < 2:
        return {}
    found = {"time/slowest_process": float(max(range(len(seconds)), key=lambda process: sum(seconds[process])))}
    for name, of_stage in zip(COMPARED, zip(*seconds, strict=True), strict=True):
        floored = [max(value, _LEAST_S) for value in of_stage]
        found[f"time/slowest_process/{name}"] = max(floored) / statistics.median_low(floored)
    return found
