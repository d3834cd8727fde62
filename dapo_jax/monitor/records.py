"""Host: a run's records in its work directory (`metrics.jsonl`, `samples/`) and in trackers."""

import json
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from dapo_jax.config.own_functions import is_own
from dapo_jax.config.sections import TrainerConfig
from dapo_jax.errors import InputError
from dapo_jax.monitor.kept_batches import MOST_BATCHES, Arrays, KeptBatches, write_batch
from dapo_jax.monitor.log import LOG
from dapo_jax.monitor.tensorboard import TensorBoard
from dapo_jax.monitor.trackers import Tracker, guarded, start_own
from dapo_jax.monitor.weights_and_biases import WeightsAndBiases
from dapo_jax.monitor.workdir import run_name

TRACKERS = ("tensorboard", "wandb")
_LOGGER = logging.getLogger(__name__)
METRICS = "metrics.jsonl"
# What metrics begin with whose values depend on the clock or the machine, not on what is computed.
CLOCK = ("time/", "timing", "perf/", "environment/time_s/", "dynamic_sampling/first_release_s")
_OPTIONS = TrainerConfig()

OnStep = Callable[[int, dict[str, float]], object]


def unheard(step: int, metrics: dict[str, float]) -> None:
    """The OnStep that does nothing."""


class RunRecords:
    """Writes the numbers and sampled texts of a run, one row per step.

    Opening drops what an earlier start wrote after `resume_step`, so a stopped run leaves the same rows as an
    uninterrupted one. Write a step's row before its checkpoint: an extra row is dropped on resume, a missing one is
    lost.

    Args:
        workdir: the run's directory, created if needed.
        options: `logger`, the trackers that also get the rows, and the run's names there.
        resume_step: step of the checkpoint that the run resumes from; None if it starts at the beginning.
        enabled: False writes nothing, for all processes but one.
        upload: copies the file of that name from the directory to permanent storage.
        given: keys of options that the command line sets.
        on_step: called after each row with its step and metrics.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        options: TrainerConfig = _OPTIONS,
        *,
        resume_step: int | None,
        enabled: bool = True,
        upload: Callable[[str], None] = lambda name: None,
        given: Sequence[str] = (),
        on_step: OnStep = unheard,
    ) -> None:
        workdir = Path(workdir)
        self._enabled, self._upload, self._on_step = enabled, upload, on_step
        self._trackers: list[Tracker] = []
        if not enabled:
            return
        self._samples = workdir / "samples"
        self._samples.mkdir(parents=True, exist_ok=True)
        self._last_step = -1 if resume_step is None else resume_step
        self._batches = KeptBatches(workdir, options.keep_batches, resume_step=self._last_step)
        _drop_rows_after(workdir, self._last_step)
        for step, path in sample_files(workdir).items():
            if step > self._last_step:
                path.unlink()
        self._metrics = open(workdir / METRICS, "a", encoding="utf-8")
        first_step = self._last_step + 1
        if "tensorboard" in options.logger:
            self._trackers.append(TensorBoard(workdir, first_step=first_step, given=given))
        project, name = options.project_name, options.experiment_name or run_name(workdir)
        if "wandb" in options.logger:
            run = WeightsAndBiases(workdir, project=project, name=name, first_step=first_step)
            self._trackers.append(guarded(run, "Weights & Biases"))
        for own in filter(is_own, options.logger):
            self._trackers.append(start_own(own, workdir, project=project, run=name, first_step=first_step))

    def describe(self, options: Mapping[str, Any], results: Sequence[str]) -> None:
        """Adds the run to the trackers' tables of runs.

        Args:
            options: value by dotted key.
            results: names of the metrics to compare runs by.
        """
        for tracker in self._trackers:
            tracker.add_config(options, results)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Appends the row of a step; it is on disk when this returns.

        Values are numbers or scalar arrays. A value that is not finite is `null` in the row, and left out of the
        trackers.

        Raises:
            TypeError: a value is not a single number.
            InputError: the step is not after the last one, or a metric is called "step".
        """
        if not self._enabled:
            return
        if step <= self._last_step:
            raise InputError(
                f"step={step} must be greater than the last step, {self._last_step}: "
                "write each step once, with all its metrics in one call"
            )
        if "step" in metrics:
            raise InputError('metric "step" would overwrite the step number: rename it')
        values = {name: _to_float(name, value) for name, value in metrics.items()}

        self._batches.keep(step, values)
        self._metrics.write(to_json_line({"step": step, **values}))
        self._metrics.flush()
        os.fsync(self._metrics.fileno())
        for name in (METRICS, LOG):
            self._upload(name)
        self._track(step, values)
        self._on_step(step, values)

    def amend(self, step: int, metrics: Mapping[str, float], samples: Sequence[Mapping[str, Any]]) -> None:
        """Adds metrics, and responses of another kind, to those of the last step. A second call changes nothing."""
        if not self._enabled:
            return
        folder, path = self._samples.parent, sample_files(self._samples.parent).get(step)
        rows = {row["step"]: row for row in read_metrics(folder)}
        rows[step] = {"step": step} | rows.get(step, {}) | dict(metrics)
        self._metrics.close()
        write_atomically(folder / METRICS, "".join(map(to_json_line, rows.values())))
        self._metrics = open(folder / METRICS, "a", encoding="utf-8")
        known = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path else []
        kinds = {sample["kind"] for sample in known}
        self.write_samples(step, known + [sample for sample in samples if sample["kind"] not in kinds])
        self._upload(METRICS)
        self._track(step, metrics)

    def _track(self, step: int, metrics: Mapping[str, float]) -> None:
        self._last_step = step
        for tracker in self._trackers:
            tracker.add_scalars(step, {name: value for name, value in metrics.items() if math.isfinite(value)})

    def write_histograms(self, step: int, histograms: Mapping[str, Mapping[str, Any]]) -> None:
        """Sends histograms, made by monitor/tensorboard.py, to the trackers."""
        for tracker in self._trackers:
            tracker.add_histograms(step, histograms)

    def write_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Writes some responses of a step with their scores, one dict of text and numbers per line.

        TensorBoard shows them as one table.
        """
        if not samples or not self._enabled:
            return
        text = "".join(to_json_line(sample) for sample in samples)
        write_atomically(self._samples / f"step_{step:06d}.jsonl", text)
        for tracker in self._trackers:
            tracker.add_samples(step, samples)

    def hold_batch(self, step: int, arrays: Arrays, *, finite: bool) -> None:
        """What a step has trained on: written to `nonfinite/` now, or to `batches/` with the row of the step.

        Args:
            finite: its loss and gradients are. Else the batch is written, if it is among the first ten of the run.
        """
        if self._enabled:
            if not finite:
                write_batch(self._samples.parent / "nonfinite", step, arrays(), at_most=MOST_BATCHES)
            self._batches.hold(step, arrays)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Flushes and closes all files; a second call does nothing."""
        if self._enabled:
            self._metrics.close()
        for tracker in self._trackers:
            tracker.close()


def read_metrics(workdir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The rows of `metrics.jsonl`, see `read_rows`."""
    return read_rows(Path(workdir) / METRICS)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file like metrics.jsonl. A truncated last line is left out.

    Raises:
        RuntimeError: any other line is not JSON.
        InputError: a line is JSON, but not a row of a step.
    """
    lines = path.read_bytes().splitlines()  # bytes: a character may be cut in half
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number < len(lines):
                raise RuntimeError(
                    f"{path}, line {number}: not JSON ({error}): "
                    "only the last line may be cut off; fix or remove the line"
                ) from error
            break
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise InputError(f"{path} has a line without a step, line {number}: fix or remove the line")
        rows.append(row)
    return rows


def sample_files(workdir: Path) -> dict[int, Path]:
    """The files of `samples/` by their step, sorted. Others there, such as copies, are left out."""
    paths = (workdir / "samples").glob("step_*.jsonl")
    found = {path.stem.removeprefix("step_"): path for path in paths}
    return {int(step): found[step] for step in sorted(found) if step.isdecimal()}


def _drop_rows_after(workdir: Path, last_step: int) -> None:
    path = workdir / METRICS
    rows = read_metrics(workdir) if path.exists() else []
    kept = [row for row in rows if row["step"] <= last_step]
    write_atomically(path, "".join(to_json_line(row) for row in kept))

    if len(kept) < len(rows):
        _LOGGER.warning(
            "%s: dropped %d rows from step %d on; the run repeats these steps",
            path,
            len(rows) - len(kept),
            last_step + 1,
        )
    last_row = kept[-1]["step"] if kept else 0
    if last_row < last_step:
        _LOGGER.warning(
            "%s: steps %d to %d have no row; the run resumes after step %d", path, last_row + 1, last_step, last_step
        )


def _to_float(name: str, value: Any) -> float:
    try:
        if isinstance(value, str):  # float() would parse it
            raise TypeError
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"metric {name!r} = {value!r} ({type(value).__name__}) must be one number") from None


def to_json_line(row: Mapping[str, Any]) -> str:
    """One line of standard JSON. NaN and infinity, which JSON lacks, become null."""
    return json.dumps(_plain(row), ensure_ascii=False, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_atomically(path: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
