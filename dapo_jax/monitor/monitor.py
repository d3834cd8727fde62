"""Host: shows and times a run in progress, and profiles single steps of it with the stages named."""

import gzip
import logging
import re
import socket
import zlib
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import jax

from dapo_jax.monitor.console import Console
from dapo_jax.monitor.timers import StageTimers, own_seconds, slowest_process
from dapo_jax.monitor.watchdog import Watchdog
from dapo_jax.parallel.processes import gather

logger = logging.getLogger(__name__)


class StepProfiles:
    """Names every training step for the profiler, and traces the chosen ones into `folder`/step_000010 and so on.

    `xprof --logdir FOLDER` shows them; Perfetto opens each `*.trace.json.gz`. A trace covers a step from its first
    sample to its last update, without the evaluation, records and checkpoint that follow. All processes take part.

    Args:
        folder: for all traces; created with the first.
        steps: training steps to trace.
    """

    def __init__(self, folder: Path, steps: Collection[int]) -> None:
        self._folder = folder
        self._steps = frozenset(steps)
        self._open = ExitStack()

    def begin(self, step: int) -> None:
        """Call it when training step `step` begins."""
        if step in self._steps:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # tracing every Python call makes traces large and steps slow
            folder = self._folder / f"step_{step:06d}"
            jax.profiler.start_trace(folder, profiler_options=options)
            self._open.callback(logger.info, "the profile of step %d is in %s", step, folder)
            self._open.callback(_make_readable, folder)
            self._open.callback(jax.profiler.stop_trace)
        self._open.enter_context(jax.profiler.StepTraceAnnotation("train", step_num=step))

    def end(self) -> None:
        """Call it when the step ends. Nothing happens if none has begun."""
        self._open.close()


@dataclass(frozen=True)
class Monitor:
    """Console, timers and profiles of this process."""

    console: Console
    timers: StageTimers
    profiles: StepProfiles
    watchdog: Watchdog = field(default_factory=Watchdog)

    @classmethod
    def silent(cls) -> "Monitor":
        """One that shows nothing."""
        return cls(Console(0, initial_step=0, enabled=False), StageTimers(), StepProfiles(Path(), ()))

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


def _make_readable(folder: Path) -> None:
    """Removes XLA's `metadata` from this host's traces: Perfetto (v20) finds no events after it."""
    for trace in folder.glob(f"plugins/profile/*/{socket.gethostname()}.trace.json.gz"):
        whole = trace.with_suffix(".tmp")
        try:
            text = gzip.decompress(trace.read_bytes())
            text = re.sub(rb'\A(\{[^\[]*?)"metadata":\{[^{}]*\},', rb"\1", text)
            text = re.sub(rb",\{\}\]\}\Z", b"]}", text)
            whole.write_bytes(gzip.compress(text))
            whole.replace(trace)
        except (OSError, EOFError, zlib.error) as error:  # another process of this host writes to the same name
            logger.warning("Perfetto may not show %s: %s", trace, error)
