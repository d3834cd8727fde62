"""Host: finds another run by its path, and the checkpoint of it that this run starts from."""

import json
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from etils import epath

from dapo_jax.config.derived import checkpoint_dir
from dapo_jax.config.places import is_address, place_of
from dapo_jax.config.sections import Config
from dapo_jax.config.values import with_values
from dapo_jax.errors import InputError
from dapo_jax.monitor.records import flatten, known_config, recorded_config
from dapo_jax.parallel.processes import gather, is_first
from dapo_jax.run.checkpoint import is_checkpoint, saved_steps

RANDOM = "random"  # model.path of a freshly initialised model
RESUMED = "trainer.resume_from_path"
PINNED = "model.path", "reference.path", "algorithm.distillation.path", RESUMED


@dataclass(frozen=True)
class Trained:
    """A run after one of its training steps."""

    config: Config  # that run's
    directory: str  # of its checkpoints
    step: int


@dataclass(frozen=True)
class Origin:
    """One checkpoint."""

    directory: str
    step: int


def find_trained(path: str) -> Trained | None:
    """The run that `path` names; None if it names something else.

    WORKDIR means that run at its newest checkpoint, WORKDIR/checkpoints/STEP at that step, wherever the run's
    trainer.checkpoint_dir is. The content of a directory decides, not its name: a workdir may be called 10.

    Raises:
        InputError: the run has no such checkpoint, or there are checkpoints without their run's config.
    """
    place = place_of(path)
    config, step = _run_at(place)
    if config is not None:
        directory = checkpoint_dir(config.workdir, config.trainer)
        return Trained(config, directory, _chosen_step(path, directory, step))
    if is_checkpoint(place) or saved_steps(place):
        raise InputError(
            f"{path} holds checkpoints without their run's config: give the run's workdir, or "
            "WORKDIR/checkpoints/STEP for one of its steps, wherever the checkpoints are"
        )
    return None


def find_checkpoint(path: str) -> Origin:
    """The checkpoint that `path` names: a run's, as in `find_trained`, a checkpoint itself, or a directory's newest.

    Raises:
        InputError: there is none.
    """
    directory, step = _checkpoints_at(place_of(path))
    return Origin(directory, _chosen_step(path, directory, step))


def pinned(config: Config) -> Config:
    """`config` with the step of each run that it starts from, so that a restart starts from the same one.

    WORKDIR becomes WORKDIR/checkpoints/STEP, and a directory of checkpoints DIRECTORY/STEP: the step that an earlier
    start of this run recorded, else the newest. Every process must call it; process 0, which has the records,
    decides.

    Raises:
        InputError: the run would start from itself.
    """
    paths = {key: attrgetter(key)(config) for key in PINNED}
    paths = {key: path for key, path in paths.items() if path and path != RANDOM}
    own = checkpoint_dir(config.workdir, config.trainer)
    for key in paths.keys() - {RESUMED}:
        if is_own(paths[key], config.workdir, own):
            raise InputError(f"{key}={paths[key]} is in this run's own workdir: choose a new workdir")

    def chosen() -> dict[str, str]:
        recorded = flatten(recorded_config(config.workdir))
        return {key: _pinned_path(path, recorded.get(key)) for key, path in paths.items()}

    return with_values(config, gather(chosen() if is_first() else None)[0])


def is_own(path: str, workdir: str, directory: str) -> bool:
    """Whether `path` names the run in `workdir` itself, whose checkpoints are in `directory`."""
    inside = _resolved(path).is_relative_to(_resolved(workdir))
    return inside or _checkpoints_at(place_of(path))[0] == directory


def _pinned_path(path: str, before: Any) -> str:
    """The path of one checkpoint if `path` could mean several; `before` is what an earlier start recorded."""
    place = place_of(path)
    directory, step = _checkpoints_at(place)
    saved = [] if step is not None else saved_steps(directory)
    if not saved:
        return path  # it names one, or whoever needs a checkpoint there will report that none exists
    named = f"{path.rstrip('/')}/checkpoints" if _run_at(place)[0] or directory != str(place) else path.rstrip("/")
    if isinstance(before, str) and place_of(before).name.isdigit() and _resolved(before).parent == _resolved(named):
        return before
    return f"{named}/{saved[-1]}"


def _run_at(place: epath.Path) -> tuple[Config | None, int | None]:
    """The config of the run with `place` as its workdir or its WORKDIR/checkpoints/STEP, and that step."""
    found: list[tuple[epath.Path, int | None]] = [(place, None)]
    if place.name.isdigit() and place.parent.name == "checkpoints":
        found.append((place.parent.parent, int(place.name)))
    for workdir, step in found:
        try:
            values = json.loads((workdir / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(values, dict) and {"workdir", "trainer", "actor"} <= set(values):
            return known_config(values, workdir), step  # Hugging Face directories also have a config.json
    return None, None


def _checkpoints_at(place: epath.Path) -> tuple[str, int | None]:
    """The directory of the checkpoints that `place` names, and the step if it names one."""
    config, step = _run_at(place)
    if config is not None:
        return checkpoint_dir(config.workdir, config.trainer), step
    if place.name.isdigit() and (is_checkpoint(place) or not place.exists()):
        return str(place.parent), int(place.name)
    inside = place / "checkpoints"  # of a workdir that has lost its config.json
    return str(inside if inside.is_dir() else place), None


def _chosen_step(path: str, directory: str, step: int | None) -> int:
    saved = saved_steps(directory)
    if not saved or step not in (None, *saved):
        held = f"but {directory} holds steps {saved}" if saved else f"but {directory} holds none"
        raise InputError(
            f"{path} must be the workdir of a run with a saved checkpoint, or one of its checkpoints, {held}: "
            "correct the path"
        )
    return saved[-1] if step is None else step


def _resolved(path: str) -> Path:
    """A path to compare with others: links resolved, an address unchanged."""
    return Path(path) if is_address(path) else Path(path).expanduser().resolve()
