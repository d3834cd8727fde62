"""Host: traces of single training steps by JAX's profiler, in which the stages have their names."""

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

    XProf shows them by `xprof --logdir FOLDER`; Perfetto opens each `*.trace.json.gz`. A step is traced from its first
    sample to its last update, without the evaluation, records and checkpoint that follow. All processes take part.

    Args:
        folder: of all traces; not created before the first.
        steps: training steps to trace.
    """

    def __init__(self, folder: Path, steps: Collection[int]) -> None:
        self._folder = folder
        self._steps = frozenset(steps)
        self._open = ExitStack()

    def begin(self, step: int) -> None:
        """Training step `step` begins."""
        if step in self._steps:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # every Python call: the trace would be large, and the step slow
            folder = self._folder / f"step_{step:06d}"
            jax.profiler.start_trace(folder, profiler_options=options)
            self._open.callback(logger.info, "the profile of step %d is in %s", step, folder)
            self._open.callback(_make_readable, folder)
            self._open.callback(jax.profiler.stop_trace)
        self._open.enter_context(jax.profiler.StepTraceAnnotation("train", step_num=step))

    def end(self) -> None:
        """The step has ended; nothing happens if none has begun."""
        self._open.close()


def _make_readable(folder: Path) -> None:
    """Takes out of this host's traces what XLA adds to the events: Perfetto (v20) finds none behind `metadata`."""
    for trace in folder.glob(f"plugins/profile/*/{socket.gethostname()}.trace.json.gz"):
        whole = trace.with_suffix(".tmp")
        try:
            text = gzip.decompress(trace.read_bytes())
            text = re.sub(rb'\A(\{[^\[]*?)"metadata":\{[^{}]*\},', rb"\1", text)
            text = re.sub(rb",\{\}\]\}\Z", b"]}", text)
            whole.write_bytes(gzip.compress(text))
            whole.replace(trace)
        except (OSError, EOFError, zlib.error) as error:  # another process of this host writes its own to the same name
            logger.warning("Perfetto may show nothing of %s: %s", trace, error)
