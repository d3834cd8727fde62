"""Host: shows, times and profiles a run in progress."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import jax

from dapo_jax.monitor.console import Console
from dapo_jax.monitor.profile import StepProfiles
from dapo_jax.monitor.slow_processes import own_seconds, slowest_process
from dapo_jax.monitor.timers import StageTimers
from dapo_jax.monitor.watchdog import Watchdog
from dapo_jax.parallel.processes import gather


@dataclass(frozen=True)
class Monitor:
    """Console, timers and profiles of this process."""

    console: Console
    timers: StageTimers
    profiles: StepProfiles
    watchdog: Watchdog = field(default_factory=Watchdog)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Shows, times and profiles the `with` block as the stage `name` of the step."""
        self.console.stage(name)
        with self.timers.time(name), jax.profiler.TraceAnnotation(name):
            yield

    def slowest_process(self) -> dict[str, float]:
        """The metrics `time/slowest_process/` of a step; {} for the first. Every process must call it."""
        own = self.timers.pop_own()
        return slowest_process(gather(own_seconds(own))) if own else {}
