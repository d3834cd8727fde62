"""Host: JAX profiler traces of single training steps, with the stages named."""

import gzip
import logging
import re
import socket
import zlib
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path

import jax

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
