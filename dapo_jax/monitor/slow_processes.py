"""Host: whether one process of a run keeps the others waiting."""

import statistics
from collections.abc import Mapping, Sequence

from dapo_jax.monitor.statistics import TRAINING_STAGES

STAGES = {
    "sampling": ("gen",),
    "rewards": ("reward", "shape", "filter"),
    "update": ("batch", *TRAINING_STAGES),
}
_LEAST_S = 1.0  # less counts as this: the quotient of short times means nothing


def own_seconds(stages: Mapping[str, float]) -> list[float]:
    """A process's own seconds of STAGES, from those of the timers (StageTimers.pop_own)."""
    return [sum(stages.get(name, 0.0) for name in names) for names in STAGES.values()]


def slowest_process(seconds: Sequence[Sequence[float]]) -> dict[str, float]:
    """Metrics `time/slowest_process/`: the longest own time of any process over the median one (of two, the shorter);
    and `time/slowest_process`, the process with the longest own time of all STAGES.

    Own seconds are the host's work: waiting for its verifiers, preparing, dispatching. Waits for devices and for other
    processes are left out, as all processes wait for the slowest. So a slow device does not show: every host waits for
    it equally long.

    Args:
        seconds: [processes][STAGES] own seconds of a step, gathered. One process has no metrics.
    """
    if len(seconds) < 2:
        return {}
    found = {"time/slowest_process": float(max(range(len(seconds)), key=lambda process: sum(seconds[process])))}
    for name, of_stage in zip(STAGES, zip(*seconds, strict=True), strict=True):
        floored = [max(value, _LEAST_S) for value in of_stage]
        found[f"time/slowest_process/{name}"] = max(floored) / statistics.median_low(floored)
    return found
