"""Host: how a step of a run can be computed again: from where, with which config, and what may explain a difference."""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from dapo_jax import __version__
from dapo_jax.command.command_line import read_options
from dapo_jax.config.derived import checkpoint_dir
from dapo_jax.config.own_functions import file_and_function
from dapo_jax.config.places import expanded, is_address
from dapo_jax.config.sections import Config, MeshConfig, TrainerConfig
from dapo_jax.config.values import flat
from dapo_jax.errors import InputError
from dapo_jax.interface.configs import with_changes
from dapo_jax.monitor.environment import environment, recorded_environment, recorded_version
from dapo_jax.monitor.kept_batches import FOLDER, batch_file, steps_kept
from dapo_jax.monitor.log import LOG
from dapo_jax.monitor.recipe import read_config
from dapo_jax.monitor.records import METRICS
from dapo_jax.run.checkpoint import saved_steps
from dapo_jax.run.other_runs import Origin, find_checkpoint
from dapo_jax.tools.plot import metrics_of, record_of

ROUNDING = 1e-4  # tolerance on other devices: of a number up to 1, and relative to a larger one
OF_ROUNDING = ("mesh.", "model.", "rollout.", "actor.", "critic.")  # options that may change the rounding


@dataclass(frozen=True)
class Plan:
    """What is computed again, from where, and how it is compared."""

    run: Path
    config: Config
    step: int
    origin: Origin | None  # None: the run's beginning
    rows: Mapping[int, Mapping[str, Any]]  # the run's metrics by step
    tolerance: float
    notes: Sequence[str]  # what may explain a difference
    from_batch: bool = False  # without weights: what follows sampling, from the batch that the run has kept

    def __str__(self) -> str:
        how = f"up to rounding, {self.tolerance:g} x max(1, |number|)" if self.tolerance else "to the bit"
        notes = [f"note: {note}" for note in self.notes]
        if self.from_batch:
            kept = batch_file(self.run / FOLDER, self.step)
            return "\n".join([f"replay of step {self.step} of {self.run} from {kept}; compared {how}", *notes])
        first, start = 1, "the beginning, as no checkpoint precedes it"
        if self.origin:
            first, start = self.origin.step + 1, f"the checkpoint of step {self.origin.step}"
        seconds = sum(row.get("timing_s/step") or 0.0 for step, row in self.rows.items() if first <= step <= self.step)
        what = f"replay of step {self.step} of {self.run} from {start}; compared {how}"
        took = f"steps to compute: {self.step - first + 1}, which took the run {seconds:.1f} s without evaluations"
        return "\n".join([what, took, *notes])


def planned(
    run: str | Path,
    step: int,
    tolerance: float | None,
    options: Mapping[str, Any] | Sequence[str],
    *,
    from_batch: bool = False,
) -> Plan:
    """How a step can be computed again: from weights, else from a batch that was kept of it, or at once `from_batch`.

    Args:
        options: by key, or as on the command line.

    Raises:
        InputError: it cannot.
    """
    folder = expanded(run)
    recorded = read_config(folder) if folder.is_dir() and not is_address(str(run)) else None
    if recorded is None:
        raise InputError(f"{run} must be a folder of this machine with the config.json of a run: give its workdir")
    rows = {row["step"]: row for row in metrics_of(record_of(folder, METRICS))}
    if step not in (done := [number for number in rows if number]):
        has = f"{min(done)} to {max(done)}" if done else "none yet"
        raise InputError(f"--step={step} must be a training step that {run} has done: {has}; choose one of these")
    if isinstance(options, Mapping):
        config = with_changes(recorded, options)
    else:
        given = ["replay", f"--config={folder / 'config.json'}", *options]
        config = read_options(given)[0] if options else recorded
    before, after = flat(recorded), flat(config)
    changed = [key for key, value in after.items() if before[key] != value and key != "workdir"]
    config, there = _here(folder, config)
    if tolerance is None:
        tolerance = ROUNDING if there or any(key.startswith(OF_ROUNDING) for key in changed) else 0.0
    notes = [*_notes(folder, config), *there, *(f"with {key}={after[key]}" for key in changed)]
    kept, origin = steps_kept(folder), None
    if from_batch and step not in kept:
        has = f"of {', '.join(map(str, kept))}" if kept else "none"
        raise InputError(
            f"--from-batch: {run} has kept no batch of step {step}, but {has} (trainer.keep_batches keeps them): leave "
            "it out, or choose one of these"
        )
    if not from_batch:
        try:
            origin = _origin(folder, recorded.trainer, step)
        except InputError as error:
            if step not in kept:
                raise
            from_batch, notes = True, [*notes, str(error)]
    return Plan(folder, config, step, origin, rows, tolerance, notes, from_batch)


def _origin(folder: Path, trainer: TrainerConfig, step: int) -> Origin | None:
    """The nearest checkpoint before `step`; without one, that from which the run began, or None."""
    directory, other = checkpoint_dir(str(folder), trainer), trainer.resume_from_path
    saved = saved_steps(directory)
    if before := [one for one in saved if one < step]:
        return Origin(directory, before[-1])
    try:
        return find_checkpoint(other) if other else None
    except InputError as error:
        later = f"steps after {saved[0]} can be replayed" if saved else "no step can be replayed"
        problem = f"no checkpoint precedes step {step}, and the run's beginning is gone: {error}; {later}"
        raise InputError(problem) from error


def _here(folder: Path, config: Config) -> tuple[Config, list[str]]:
    """`config` with a mesh of the devices that are here, and how the run's machine differs, in words."""
    try:
        machines = [one | one["versions"] for one in (recorded_environment(folder), environment())]
        pairs = {name: [one[name] for one in machines] for name in ("devices", "processes", "host", "jax", "jaxlib")}
        notes = [f"the run's {name}: {old}; here: {new}" for name, (old, new) in pairs.items() if old != new]
    except (OSError, ValueError, KeyError, TypeError):
        notes = ["the run's environment.json cannot be read: its machine is not known"]
    fixed, count = config.mesh.fsdp * config.mesh.expert * config.mesh.tensor, len(jax.devices())
    if notes and (count % fixed or config.mesh.data not in (-1, count // fixed)):
        notes.append(f"mesh.data={count}, since the run's mesh needs other devices")
        config = dataclasses.replace(config, mesh=MeshConfig())
    return config, notes


def _notes(folder: Path, config: Config) -> Iterator[str]:
    """What else may explain a difference."""
    if (version := recorded_version(folder)) != __version__:
        yield f"the run is of dapo_jax {version}, this is {__version__}"
    for option, value in flat(config).items():
        copy, found = folder / "functions" / f"{option}.py", file_and_function(str(value))
        if found and copy.is_file() and found[0].is_file() and copy.read_bytes() != found[0].read_bytes():
            yield f"{option}={value}: the file is not {copy} any more, with which the run was computed"
    log = (folder / LOG).read_text(encoding="utf-8", errors="replace") if (folder / LOG).exists() else ""
    for changed in re.findall(r"resuming with a changed config: (.*)", log):
        yield f"the run was resumed with a changed config: {changed}"
