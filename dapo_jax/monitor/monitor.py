"""Host: what shows and times a run while it is under way."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import jax

from dapo_jax.monitor.console import Console
from dapo_jax.monitor.profile import StepProfiles
from dapo_jax.monitor.timers import StageTimers


@dataclass(frozen=True)
class Monitor:
    """Console, timers and profiles of this process."""

    console: Console
    timers: StageTimers
    profiles: StepProfiles

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Shows, times and profiles what runs inside it as the stage `name` of the step."""
        self.console.stage(name)
        with self.timers.time(name), jax.profiler.TraceAnnotation(name):
            yield
