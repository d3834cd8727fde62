"""Host: saves and restores everything that a run needs to resume as if it had never stopped."""

import dataclasses
import json
import math
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import absl.logging
import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

from dapo_jax.config.places import is_address
from dapo_jax.config.sections import TrainerConfig
from dapo_jax.errors import InputError
from dapo_jax.learner.optimizer import Models, TrainState
from dapo_jax.parallel.endings import is_jax_failure
from dapo_jax.parallel.processes import SharedFailure, gather, is_first
from dapo_jax.run import integrity
from dapo_jax.run.progress import Progress, of_held_out

_METRIC = "value"  # name under which a checkpoint's quality is saved
_HELD_OUT = "held_out"  # the checksum of what it was measured on
_STEP_RECORDS = "_CHECKPOINT_METADATA"  # Orbax writes it into each checkpoint's directory
_SPARE_BYTES = 16 << 20  # for names, shapes and records


class Checkpoints:
    """The checkpoints of a run, written in the background. All processes take part.

    The newest and the best are kept. An incomplete checkpoint does not count.

    Args:
        directory: an absolute path or an address like gs://bucket/run; created if needed.
        options: how many to keep. One saved with another best_metric or best_metric_mode, or measured on other
            held-out problems, counts as the worst.
        read_only: for another run, which may still be training: nothing is created, cleaned up or written, and `save`
            does nothing.
    """

    def __init__(self, directory: str, options: TrainerConfig, *, read_only: bool = False) -> None:
        self.directory, self._read_only = directory, read_only
        self._saved_at = time.monotonic()
        metric, mode = options.best_metric, options.best_metric_mode
        self._metric = measure = _METRIC if (metric, mode) == ("", "max") else f"{_METRIC} of {mode} {metric}"
        self._held_out, of_problems, sign = "", of_held_out(metric), 1 if mode == "max" else -1

        def quality(metrics: dict[str, Any]) -> Any:
            """What Orbax sorts by. Of equally good ones the first is the best, as in `progress.with_quality`."""
            comparable = not of_problems or metrics.get(_HELD_OUT, self._held_out) == self._held_out
            value = metrics.get(measure) if comparable else None
            return -math.inf if value is None else sign * value, -(metrics.get("step") or 0)

        best = _BestMeasured(get_metric_fn=quality, n=options.keep_best_ckpt, keep_checkpoints_without_metrics=False)
        log = absl.logging.get_absl_logger()
        level = log.level
        if read_only:
            log.setLevel("ERROR")  # Orbax warns about read_only itself
        try:
            self._manager = ocp.CheckpointManager(
                epath.Path(directory),
                options=ocp.CheckpointManagerOptions(
                    preservation_policy=AnyPreservationPolicy([LatestN(options.max_ckpt_to_keep), best]),
                    best_fn=quality,  # without it Orbax reads no metrics
                    create=not read_only,
                    read_only=read_only,
                    async_options=ocp.AsyncOptions(timeout_secs=options.checkpoint_timeout_s),
                ),
                item_handlers={
                    "models": ocp.PyTreeCheckpointHandler(),
                    "progress": ocp.JsonCheckpointHandler(),
                    "stream": ocp.StandardCheckpointHandler(),
                },
            )
        except OSError as error:
            raise InputError(
                f"the checkpoint directory {directory} cannot be used ({error}): choose another by "
                "trainer.checkpoint_dir or workdir"
            ) from error
        except ValueError as error:  # Orbax has read the checkpoints' metrics
            raise InputError(
                f"a checkpoint in {directory} is damaged ({_first_line(error)}): look for an empty or broken file "
                f"{directory}/*/metrics/metrics and move its checkpoint away"
            ) from error
        finally:
            log.setLevel(level)
        if not read_only and is_first():
            _remove_unfinished(epath.Path(directory))

    def latest_step(self) -> int | None:
        """The newest complete step."""
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """The steps of all checkpoints, once they are on disk. Every process must call it."""
        with self._writing():
            self._manager.wait_until_finished()
        return list(self._manager.all_steps())

    def minutes_since_save(self) -> float:
        """Minutes since the start or the checkpoint that was saved or restored last, by this process's clock."""
        return (time.monotonic() - self._saved_at) / 60

    def save(
        self,
        models: Models,
        progress: Progress,
        stream: dict[str, Any],
        *,
        metric: float | None = None,
        replace: bool = False,
    ) -> None:
        """Writes a checkpoint of progress.step, unless one exists.

        Args:
            stream: NumPy arrays of any shape, nested by name: what is saved besides models and progress.
            metric: how good the policy is, to choose the best checkpoints.
            replace: write an existing one again, if another one is left to resume from meanwhile; else only its metric,
                and that the data is solved.

        Raises:
            RuntimeError: there is no space for it, an earlier one could not be written, or copies of an array on
                several devices differ.
        """
        if self._read_only:
            return
        steps = self._manager.all_steps()
        value = metric if metric is not None and math.isfinite(metric) else None
        measured = {self._metric: value, "step": progress.step, _HELD_OUT: progress.held_out}
        self._held_out = progress.held_out
        if progress.step in steps and not (replace and len(steps) > 1):
            if replace:
                self._rewrite(progress, measured)
            return
        record = integrity.sealed(progress, _trained(models), stream)
        self._saved_at = time.monotonic()
        with self._writing():
            self._manager.wait_until_finished()  # also raises an error of the background
            if progress.step in steps:
                self._manager.delete(progress.step)
            self._check_space(models, stream)
            arguments = ocp.args.Composite(
                models=ocp.args.PyTreeSave(_trained(models)),
                progress=ocp.args.JsonSave(record),
                stream=ocp.args.StandardSave(stream),
            )
            self._manager.save(progress.step, args=arguments, metrics=measured)

    def _rewrite(self, progress: Progress, measured: dict[str, Any]) -> None:
        """Gives an existing checkpoint another metric and, if the data is solved, this progress."""
        with self._writing():
            self._manager.wait_until_finished()
            if is_first():
                folder = epath.Path(self.directory) / str(progress.step)
                files = {folder / "metrics" / "metrics": measured}
                if progress.solved:
                    record = folder / "progress" / "metadata"
                    files[record] = integrity.resealed(progress, json.loads(record.read_text()))
                for file, content in files.items():
                    (file.parent / "new").write_text(json.dumps(content))
                    (file.parent / "new").replace(file)
            gather(None)  # the other processes read it too
            self._manager.reload()

    def restore(self, step: int, shape: Models) -> tuple[Models, Progress, dict[str, Any]]:
        """The models, laid out as in `shape` (jax.ShapeDtypeStruct with shardings), the progress and the stream.

        Raises:
            InputError: the checkpoint is damaged, or holds other models than the run.
        """
        wanted = _trained(shape)
        saved = self._saved_arrays(step)
        models = sorted({name.partition(".")[0] for name in saved})
        if models != sorted(wanted):
            raise InputError(
                f"the checkpoint of step {step} holds {models}, but the run has {sorted(wanted)}: choose another "
                "workdir, or the algorithm.adv_estimator that the checkpoint was made with"
            )
        found, progress, arrays = self._restored(step, saved, wanted, stream=ocp.args.StandardRestore())
        self._saved_at = time.monotonic() - max(time.time() - progress.saved_at, 0.0)
        found = jax.tree.map(integrity.in_dtype, found, wanted)
        return Models(**found), dataclasses.replace(progress, arrays={}, stream=""), arrays

    def record(self, step: int) -> tuple[Progress, dict[str, Any]]:
        """The progress, with the checksums of the models' arrays, and the stream, without reading the models.

        Raises:
            InputError: the checkpoint is damaged.
        """
        with self._reading(step):
            arguments = ocp.args.Composite(progress=ocp.args.JsonRestore(), stream=ocp.args.StandardRestore())
            restored = self._manager.restore(step, args=arguments)
            progress = integrity.opened(restored["progress"], step)
            integrity.check_stream(progress, restored["stream"])
        return progress, restored["stream"]

    def restore_policy(self, step: int, shape: Any) -> tuple[Any, Progress]:
        """Only the policy's parameters, laid out as in `shape`, and the progress.

        Raises:
            InputError: the checkpoint is damaged, or holds other parameters.
        """
        wanted = {"actor": {"params": shape}}
        saved = {name: array for name, array in self._saved_arrays(step).items() if name.startswith("actor.params.")}
        found, progress, _ = self._restored(step, saved, wanted)
        return found["actor"]["params"], progress

    def _restored(
        self, step: int, saved: dict[str, jax.ShapeDtypeStruct], wanted: dict[str, Any], **stream: Any
    ) -> tuple[Any, Progress, Any]:
        """Arrays laid out as in `wanted`, the progress, and the stream if `stream` says how; all of them checked."""
        integrity.check_shapes(step, saved, wanted)
        models = integrity.restore_as(wanted, saved, partial_restore=not stream)
        with self._reading(step):
            arguments = ocp.args.Composite(models=models, progress=ocp.args.JsonRestore(), **stream)
            restored = self._manager.restore(step, args=arguments)
            progress = integrity.opened(restored["progress"], step)
            integrity.check_arrays(progress, restored["models"])
            if stream:
                integrity.check_stream(progress, restored["stream"])
        return restored["models"], progress, restored.get("stream")

    def _saved_arrays(self, step: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of each array of the models by its path."""
        with self._reading(step):
            leaves = jax.tree.leaves(self._manager.item_metadata(step)["models"].tree)
        arrays = (leaf for leaf in leaves if hasattr(leaf, "shape"))
        return {leaf.name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in arrays}

    def close(self) -> None:
        """Waits until everything is on disk. RuntimeError if writing fails."""
        self.steps()
        self._manager.close()

    def _check_space(self, models: Models, stream: dict[str, Any]) -> None:
        if is_address(self.directory):
            return  # a bucket has no limit
        needed = _SPARE_BYTES + sum(leaf.nbytes for leaf in jax.tree.leaves((_trained(models), stream)))
        free = shutil.disk_usage(Path(self.directory)).free
        if free < needed:
            raise OSError(f"it needs {needed / 1e9:.2f} GB, but only {free / 1e9:.2f} GB are free")

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Orbax and its file systems raise many classes
            if is_jax_failure(error):
                raise
            complete = max(saved_steps(self.directory), default=None)
            fix = "make room, or move the checkpoints elsewhere and set trainer.checkpoint_dir"
            if isinstance(error, TimeoutError):
                fix = "raise trainer.checkpoint_timeout_s, or write less (docs/scaling.md)"
            raise RuntimeError(
                f"a checkpoint could not be written to {self.directory}: {_first_line(error)}. "
                f"{'There is none yet' if complete is None else f'The one of step {complete} is complete'}: {fix}, "
                "and rerun the same command"
            ) from error

    @contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        try:
            with integrity.whole_loops():
                yield
        except Exception as error:  # as above
            if is_jax_failure(error) or isinstance(error, SharedFailure):
                raise
            others = [number for number in self._manager.all_steps() if number != step]
            rest = f"resume from step {max(others)}" if others else "start over"
            raise InputError(
                f"the checkpoint of step {step} in {self.directory} is damaged ({_first_line(error)}): restore "
                f"{self.directory}/{step} from a copy, or move it away to {rest}"
            ) from error


class _BestMeasured(BestN):
    """The best of those that have been measured, and no others in their place."""

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        quality: Any = self.get_metric_fn
        measured = [one for one in checkpoints if one.metrics and quality(one.metrics)[0] > -math.inf]
        best = super().should_preserve(measured, context=context)
        kept = {one.step for one, is_best in zip(measured, best, strict=True) if is_best}
        return [one.step in kept for one in checkpoints]


def is_checkpoint(place: epath.Path) -> bool:
    """Whether a directory is a complete checkpoint: named by its step, with Orbax's records."""
    written = place.name.isdigit() and (place / _STEP_RECORDS).exists()
    return written and ocp.utils.is_checkpoint_finalized(place)


def _remove_unfinished(directory: epath.Path) -> None:
    """Removes what a killed run was writing. Orbax does so in a thread, which fails if the command ends at once."""
    for place in directory.iterdir():
        if place.name.partition(".")[0].isdigit() and place.is_dir() and ocp.utils.is_tmp_checkpoint(place):
            place.rmtree()


def saved_steps(directory: epath.PathLike) -> list[int]:
    """The steps of the complete checkpoints in a directory, sorted."""
    place = epath.Path(directory)
    return sorted(int(one.name) for one in place.iterdir() if is_checkpoint(one)) if place.is_dir() else []


def _first_line(error: Exception) -> str:
    """What happened, without TensorStore's description of the array."""
    return (str(error) or type(error).__name__).splitlines()[0].partition(". See full TensorStore")[0][:300]


def _trained(models: Models) -> dict[str, TrainState]:
    """The models that the run has, by name."""
    return {name: state for name, state in vars(models).items() if state is not None}
