"""Host: a run between two steps: where it begins, and how it is saved and restored."""

import dataclasses
import logging
from dataclasses import dataclass
from typing import Any

from dapo_jax.checkpoint import Checkpoints, Origin, Progress, find_checkpoint
from dapo_jax.collection import Collected, collected_arrays, restore_collected
from dapo_jax.config import Config, checkpoint_dir
from dapo_jax.dynamic_sampling.accumulation import StreamState
from dapo_jax.dynamic_sampling.schedule import History
from dapo_jax.learner.models import Models
from dapo_jax.monitor.records import config_differences
from dapo_jax.parallel.processes import check_agreement, is_first
from dapo_jax.prompt_stream import restore_stream, stream_arrays
from dapo_jax.run import Run
from dapo_jax.validation import warnings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunState:
    """All that a run has to know to go on as if it had never stopped."""

    models: Models
    progress: Progress
    stream: StreamState
    engine: dict[str, Any]  # what the sampling engine has learnt by now; it learns while the next step samples
    ahead: Collected | None = None  # with trainer.rollout_ahead: what the next step trains on


def starting_point(config: Config, checkpoints: Checkpoints) -> Origin | None:
    """The run's newest checkpoint, else the one of trainer.resume_from_path; None for a new run.

    Raises:
        ValueError: the workdir holds a checkpoint and is not to, or the other run has none.
    """
    latest = checkpoints.latest_step()
    check_agreement({"the step of the newest checkpoint": latest})
    if latest is not None and config.trainer.resume_mode == "disable":
        raise ValueError(
            f"workdir={config.workdir} holds a checkpoint of step {latest} and trainer.resume_mode=disable: "
            "choose another workdir, or resume_mode=auto to go on"
        )
    if latest is not None:
        origin = Origin(checkpoint_dir(config), latest)
    else:
        origin = find_checkpoint(config.trainer.resume_from_path) if config.trainer.resume_from_path else None
    if is_first():
        values = dataclasses.asdict(config)
        if latest is not None:
            for line in config_differences(config.workdir, values):
                logger.warning("going on with another config: %s", line)
        for line in warnings(config):
            logger.warning("%s", line)
    return origin


def first_state(run: Run) -> RunState:
    """A run before its first step."""
    progress = Progress(
        kl_coef=run.config.algorithm.kl_ctrl.kl_coef,
        unrecorded={"metrics": {}, "samples": []} if run.config.trainer.val_before_train else None,
        prompts=run.train_set.checksum(),
    )
    return RunState(run.init_models(), progress, _first_stream(run), run.sampler.engine.to_arrays())


def _first_stream(run: Run) -> StreamState:
    return StreamState(
        next_prompt=0,
        keep_rate=run.config.algorithm.filter_groups.stream.keep_rate_prior,
        history=History.empty(len(run.train_set)),
    )


def save_state(run: Run, checkpoints: Checkpoints, state: RunState, *, metric: float | None = None) -> None:
    """Begins to write `state`; `metric` is how good it is, None if that was not measured."""
    arrays = {**stream_arrays(state.stream), "engine": state.engine}
    if state.ahead is not None:
        arrays["ahead"] = collected_arrays(state.ahead)
    with run.stage("save_checkpoint"):
        checkpoints.save(state.models, state.progress, arrays, metric=metric)


def restore_state(run: Run, checkpoints: Checkpoints, origin: Origin) -> RunState:
    """The state that was saved at `origin`.

    Raises:
        ValueError: it is of another model, of this run with other prompts, or damaged.
    """
    critic_shape = run.critic.trainable.state_shape if run.critic is not None else None
    shape = Models(actor=run.actor.trainable.state_shape, critic=critic_shape)
    own = origin.directory == checkpoint_dir(run.config)
    source = checkpoints if own else Checkpoints(origin.directory, read_only=True)
    models, progress, arrays = source.restore(origin.step, shape)
    if not own:
        source.close()
    logger.warning("going on after step %d of %s", origin.step, run.config.workdir if own else origin.directory)
    engine = run.sampler.engine
    engine.restore(arrays["engine"])
    prompts = run.train_set.checksum()
    if progress.prompts not in ("", prompts):
        if own:
            raise ValueError(
                f"the training prompts are not those that workdir={run.config.workdir} has trained on: restore the "
                "data options and files, or begin in a new workdir with trainer.resume_from_path or model.path set to "
                "this one"
            )
        logger.warning("the training prompts are not those of %s: they begin with the first", origin.directory)
        progress = dataclasses.replace(progress, prompts=prompts)
        return RunState(models, progress, _first_stream(run), engine.to_arrays())
    ahead = restore_collected(run, arrays["ahead"]) if "ahead" in arrays else None
    return RunState(models, progress, restore_stream(run, arrays), engine.to_arrays(), ahead)
