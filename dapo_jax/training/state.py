"""Host: the state of a run between two steps: where it starts, and how it is saved and restored."""

import dataclasses
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from dapo_jax.config.sections import AlgorithmConfig, DataConfig, RolloutConfig
from dapo_jax.data.experience import Collected, Experience, from_arrays, to_arrays
from dapo_jax.data.prompts import PromptSet
from dapo_jax.data.tokenizer import Tokenizer
from dapo_jax.dynamic_sampling.prompt_stream import History, StreamState
from dapo_jax.errors import InputError
from dapo_jax.learner.optimizer import Models
from dapo_jax.models.identity import Identity, differences
from dapo_jax.monitor.alarms import without_held_out
from dapo_jax.run.checkpoint import Checkpoints
from dapo_jax.run.other_runs import Origin
from dapo_jax.run.parts import Run
from dapo_jax.run.progress import Progress, best_of, kl_coef_of, of_held_out, resumed_coefficient, without_best
from dapo_jax.run.segments import Segments

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunState:
    """Everything that a run needs to resume as if it had never stopped."""

    models: Models
    progress: Progress
    stream: StreamState
    engine: dict[str, Any]  # what the rollout engine has learnt so far; it keeps learning as it samples
    ahead: Collected | None = None  # with trainer.rollout_ahead: what the next step trains on

    def is_whole(self) -> bool:
        """Whether its arrays still exist: the first optimizer step of the next update donates them."""
        return not any(leaf.is_deleted() for leaf in jax.tree.leaves(self.models))


def first_state(run: Run) -> RunState:
    """A run before its first step."""
    algorithm = run.config.algorithm
    progress = Progress(
        kl_coef=algorithm.kl_ctrl.kl_coef,
        kl_coef_of=kl_coef_of(algorithm),
        unrecorded={"metrics": {}, "samples": [], "histograms": {}} if run.config.trainer.val_before_train else None,
        prompts=run.problems.train_set.checksum(),
        mixture=run.problems.order.parts,
        loaded=loaded_models(run),
        held_out=run.held_out.checksum(),
        log_bytes=0,
        temperature=run.config.rollout.temperature,
    )
    return RunState(run.learner.networks.init_models(), progress, _first_stream(run), run.sampler.engine.learnt.state())


def loaded_models(run: Run) -> dict[str, Identity]:
    """The identity of each model that the run has loaded, by its option."""
    scorer = run.rewards.scorer
    return {**run.learner.networks.loaded, **({"reward.model.path": scorer.identity} if scorer is not None else {})}


def _first_stream(run: Run) -> StreamState:
    return StreamState(
        next_prompt=0,
        keep_rate=run.config.algorithm.filter_groups.stream.keep_rate_prior,
        history=History.empty(len(run.problems.train_set)),
    )


def save_state(run: Run, checkpoints: Checkpoints, state: RunState, *, replace: bool = False) -> None:
    """Begins to write `state`, with how good its policy is."""
    progress = dataclasses.replace(state.progress, saved_at=time.time())
    with run.monitor.stage("save_checkpoint"):
        arrays = saved_arrays(state, run.problems.train_set)
        checkpoints.save(state.models, progress, arrays, metric=progress.quality, replace=replace)


def saved_arrays(state: RunState, prompts: PromptSet | None = None) -> dict[str, Any]:
    """What is saved of `state` besides models and progress: NumPy arrays, nested by name; `prompts` as `to_arrays`."""
    stream, ahead = state.stream, state.ahead
    arrays: dict[str, Any] = {
        "next_prompt": np.array(stream.next_prompt),
        "keep_rate": np.array(stream.keep_rate),
        **vars(stream.history),
        "engine": state.engine,
    }
    if stream.lowest:
        arrays["lowest_given"] = _as_bytes(stream.lowest)
    if stream.carried is not None:
        arrays["carried"] = to_arrays(stream.carried, prompts)
    if stream.begun is not None:
        arrays["begun"] = to_arrays(stream.begun, prompts)
    if ahead is not None:
        numbers = _as_bytes([ahead.metrics, ahead.num_kept, ahead.num_evaluated])
        groups = {} if ahead.experience is None else {"experience": to_arrays(ahead.experience, prompts)}
        arrays["ahead"] = {"numbers": numbers, **groups}
    return arrays


def _as_bytes(value: Any) -> np.ndarray:
    """The JSON of a value, uint8."""
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def _from_bytes(array: Any) -> Any:
    return json.loads(np.asarray(array).tobytes())


def restored_arrays(
    arrays: Mapping[str, Any], prompts: PromptSet, tokenizer: Tokenizer
) -> tuple[StreamState, Collected | None]:
    """The stream, and the batch that was sampled ahead, of `saved_arrays`; the engine restores its own."""

    def experience(arrays: Mapping[str, Any], name: str) -> Experience | None:
        return from_arrays(arrays[name], prompts, tokenizer) if name in arrays else None

    history = vars(History.empty(len(prompts)))  # what a checkpoint of an earlier version lacks begins here
    stream = StreamState(
        next_prompt=int(arrays["next_prompt"]),
        keep_rate=float(arrays["keep_rate"]),
        history=History(**{name: np.asarray(arrays.get(name, value)) for name, value in history.items()}),
        carried=experience(arrays, "carried"),
        begun=experience(arrays, "begun"),
        lowest=_from_bytes(arrays["lowest_given"]) if "lowest_given" in arrays else {},
    )
    if "ahead" not in arrays:
        return stream, None
    metrics, num_kept, num_evaluated = _from_bytes(arrays["ahead"]["numbers"])
    return stream, Collected(experience(arrays["ahead"], "experience"), metrics, num_kept, num_evaluated)


def restore_state(run: Run, checkpoints: Checkpoints, origin: Origin) -> RunState:
    """The state that was saved at `origin`.

    Raises:
        ValueError: it is of another model, of this run with other prompts or other models with it, or damaged.
    """
    actor, critic = run.learner.networks.actor, run.learner.networks.critic
    critic_shape = critic.trainable.state_shape if critic is not None else None
    shape = Models(actor=actor.trainable.state_shape, critic=critic_shape)
    own = origin.directory == checkpoints.directory
    source = checkpoints if own else Checkpoints(origin.directory, run.config.trainer, read_only=True)
    try:
        models, progress, arrays = source.restore(origin.step, shape)
    finally:
        if not own:
            source.close()
    if not own:
        progress = dataclasses.replace(progress, log_bytes=0, solved="")  # of this run
    progress = resumed_coefficient(run.config.algorithm, progress)
    if progress.best_of not in ("", best_of(run.config.trainer)):
        progress = without_best(progress)
    sampled_at = progress.temperature
    progress = dataclasses.replace(progress, temperature=run.config.rollout.temperature)
    _check_loaded(progress.loaded, loaded := loaded_models(run), origin, own=own)
    progress = _on_held_out(run, dataclasses.replace(progress, loaded=loaded))
    logger.warning("resuming after step %d of %s", origin.step, origin.directory)
    learnt = run.sampler.engine.learnt
    learnt.restore(arrays["engine"])
    prompts, order = run.problems.train_set.checksum(), run.problems.order
    if progress.prompts not in ("", prompts):
        if own:
            raise InputError(
                f"the training prompts are not those that workdir={run.config.workdir} has trained on: restore the "
                "data options and files, or start in a new workdir with trainer.resume_from_path or model.path set to "
                "this one"
            )
        logger.warning("the training prompts are not those of %s: they begin with the first", origin.directory)
        progress = dataclasses.replace(without_best(progress), prompts=prompts, mixture=order.parts, alarms={})
        return RunState(models, progress, _first_stream(run), learnt.state())
    stream, ahead = restored_arrays(arrays, run.problems.train_set, run.sampler.tokenizer)
    progress = dataclasses.replace(progress, mixture=order.resumed(progress.mixture, stream.next_prompt))
    if held := sum(len(groups) for groups in (stream.carried, ahead and ahead.experience) if groups):
        logger.warning("%d groups of the checkpoint are trained on with the rewards that they were given", held)
    check_sampling(run.config.data, run.config.rollout, run.config.algorithm, stream, ahead, sampled_at)
    if stream.begun:
        segments = Segments(run.config.rollout.segment_length, run.config.data.max_response_length)
        segments.check(stream.begun, progress.step)
    return RunState(models, progress, stream, learnt.state(), ahead)


def _check_loaded(saved: Mapping[str, Identity], found: Mapping[str, Identity], origin: Origin, *, own: bool) -> None:
    """Raises InputError if a loaded model is not the one that the checkpoint was made with.

    Only a run that begins as another run was may have another reference, teacher or reward model; it is warned of.
    """
    for option in found:
        changed = differences(saved.get(option, {}), found[option])
        if not changed:
            continue
        problem = f"{option} is not the model that {origin.directory} was made with: {', '.join(changed)}"
        if own or option == "model.path":
            raise InputError(
                f"{problem}: restore its files and options, or start in a new workdir with model.path set to that run"
            )
        logger.warning("%s", problem)


def _on_held_out(run: Run, progress: Progress) -> Progress:
    """`progress` with the run's held-out problems; what it knows of accuracies on others is forgotten."""
    checksum = run.held_out.checksum()
    if progress.held_out in ("", checksum):
        return dataclasses.replace(progress, held_out=checksum)
    logger.warning(
        "the held-out problems, or how they are sampled and scored, are not those of the checkpoint: the best step, "
        "trainer.keep_best_ckpt and alarm/heldout_drop begin again"
    )
    progress = dataclasses.replace(progress, held_out=checksum, alarms=without_held_out(progress.alarms))
    if of_held_out(run.config.trainer.best_metric):
        progress = without_best(progress)
    return progress


def check_sampling(
    data: DataConfig,
    rollout: RolloutConfig,
    algorithm: AlgorithmConfig,
    stream: StreamState,
    ahead: Collected | None,
    temperature: float | None,
) -> None:
    """Raises InputError unless the run would have sampled the groups of a checkpoint as they were.

    Args:
        temperature: at which they were sampled: their log-probabilities are of it. None = not known.
    """
    size = int(ahead.metrics["dynamic_sampling/target_prompt_num"]) if ahead else None
    values: list[tuple[str, Any, Any]] = [("data.train_batch_size", size, data.train_batch_size)]
    for groups in filter(None, (stream.carried, ahead and ahead.experience, stream.begun)):
        values += [
            ("rollout.n", groups.responses.shape[1], rollout.n),
            ("data.max_response_length", groups.responses.shape[2], data.max_response_length),
            ("rollout.temperature", temperature, rollout.temperature),
        ]
        if groups is not stream.begun:
            values.append(("algorithm.use_kl_in_reward", groups.kl is not None, algorithm.use_kl_in_reward))
    for name, found, wanted in values:
        if found not in (None, wanted):
            raise InputError(
                f"the checkpoint holds groups that were sampled with {name}={found}, and the run has {wanted}: restore "
                "that value, or start in a new workdir with model.path set to this one"
            )
