"""Host: finds another run by its path, and the checkpoint of it that this run starts from."""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from etils import epath

from dapo_jax.command.warnings import warnings
from dapo_jax.config.derived import checkpoint_dir
from dapo_jax.config.places import is_address, place_of
from dapo_jax.config.sections import Config
from dapo_jax.config.values import flat, with_values
from dapo_jax.errors import InputError
from dapo_jax.monitor.recipe import config_differences, known_config, recorded_options
from dapo_jax.parallel.processes import check_agreement, gather, is_first
from dapo_jax.run.checkpoint import Checkpoints, is_checkpoint, saved_steps

RANDOM = "random"  # model.path of a freshly initialised model
RESUMED = "trainer.resume_from_path"
PINNED = "model.path", "reference.path", "algorithm.distillation.path", RESUMED

logger = logging.getLogger(__name__)


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
    place, config, directory, step = _checkpoints_at(path)
    if config is not None:
        return Trained(config, directory, _chosen_step(path, directory, step))
    if is_checkpoint(place) or saved_steps(place):
        raise InputError(
            f"{path} holds checkpoints without their run's config: give the run's workdir, or "
            "WORKDIR/checkpoints/STEP for one of its steps, wherever the checkpoints are"
        )
    return None


def first_model(path: str) -> str:
    """`path` or, if that is a run, the model that it started from."""
    trained = find_trained(path)
    return path if trained is None else first_model(trained.config.model.path)


def find_checkpoint(path: str) -> Origin:
    """The checkpoint that `path` names: a run's, as in `find_trained`, a checkpoint itself, or a directory's newest.

    Raises:
        InputError: there is none.
    """
    _, _, directory, step = _checkpoints_at(path)
    return Origin(directory, _chosen_step(path, directory, step))


def starting_point(config: Config, checkpoints: Checkpoints, lines: Sequence[str] = ()) -> Origin | None:
    """The run's newest checkpoint, else the one of trainer.resume_from_path; None for a new run.

    Args:
        lines: of the command, for the log.

    Raises:
        ValueError: the workdir holds a checkpoint although trainer.resume_mode=disable, or the run to start from has
            none.
    """
    latest, directory = checkpoints.latest_step(), checkpoints.directory
    check_agreement({"the step of the newest checkpoint": latest})
    if latest is not None and config.trainer.resume_mode == "disable":
        raise InputError(
            f"workdir={config.workdir} holds a checkpoint of step {latest} and trainer.resume_mode=disable: "
            "choose another workdir, or resume_mode=auto to resume"
        )
    other, total = config.trainer.resume_from_path, config.trainer.total_training_steps
    if latest is not None:
        origin = Origin(directory, latest)
    else:
        origin = find_checkpoint(other) if other else None
    if other and is_own(other, config.workdir, directory):
        raise InputError(
            f"trainer.resume_from_path={other} is in workdir={config.workdir} itself: choose a new workdir to resume "
            "from one of its earlier checkpoints"
        )
    if origin is not None and origin.step > total > 0:  # -1: known once the prompts are read
        raise InputError(
            f"trainer.total_training_steps={total} is less than the {origin.step} steps that {origin.directory} has "
            "done: raise it, or choose another workdir"
        )
    if is_first():
        if latest is not None:
            for line in config_differences(config.workdir, flat(config)):
                logger.warning("resuming with a changed config: %s", line)
        for line in lines:
            logger.info("%s", line)  # the console has shown it already, before the log was open
        for line in warnings(config):
            logger.warning("%s", line)
    return origin


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
        recorded = recorded_options(config.workdir)
        return {key: _pinned_path(path, recorded.get(key)) for key, path in paths.items()}

    return with_values(config, gather(chosen() if is_first() else None)[0])


def is_own(path: str, workdir: str, directory: str) -> bool:
    """Whether `path` names the run in `workdir` itself, whose checkpoints are in `directory`."""
    inside = _resolved(path).is_relative_to(_resolved(workdir))
    return inside or _checkpoints_at(path).directory == directory


def _pinned_path(path: str, before: Any) -> str:
    """The path of one checkpoint if `path` could mean several; `before` is what an earlier start recorded."""
    place, config, directory, step = _checkpoints_at(path)
    saved = [] if step is not None else saved_steps(directory)
    if not saved:
        return path  # it names one, or whoever needs a checkpoint there will report that none exists
    inside = config is not None or directory != str(place)
    named = path.rstrip("/") + "/checkpoints" * inside
    if isinstance(before, str) and place_of(before).name.isdigit() and _resolved(before).parent == _resolved(named):
        return before
    return f"{named}/{saved[-1]}"


class _Found(NamedTuple):
    """Checkpoints that a path names."""

    place: epath.Path  # the path's
    config: Config | None  # of their run, if the path is its WORKDIR or WORKDIR/checkpoints/STEP
    directory: str
    step: int | None  # if it names one


def _checkpoints_at(path: str) -> _Found:
    """Where the checkpoints are that `path` names; perhaps there are none."""
    place = place_of(path)
    found: list[tuple[epath.Path, int | None]] = [(place, None)]
    if place.name.isdigit() and place.parent.name == "checkpoints":
        found.append((place.parent.parent, int(place.name)))
    for workdir, step in found:
        try:
            values = json.loads((workdir / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(values, dict) and {"workdir", "trainer", "actor"} <= set(values):
            config = known_config(values, workdir)  # Hugging Face directories also have a config.json
            return _Found(place, config, checkpoint_dir(config.workdir, config.trainer), step)
    if place.name.isdigit() and (is_checkpoint(place) or not place.exists()):
        return _Found(place, None, str(place.parent), int(place.name))
    inside = place / "checkpoints"  # of a workdir that has lost its config.json
    return _Found(place, None, str(inside if inside.is_dir() else place), None)


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
