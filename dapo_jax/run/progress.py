"""Host: where a run is, besides its parameters."""

import dataclasses
import hashlib
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dapo_jax.algorithms.kl import adapted_coefficient
from dapo_jax.config.derived import trains_on_older_samples
from dapo_jax.config.sections import AlgorithmConfig, Config, TrainerConfig
from dapo_jax.data.experience import Collected
from dapo_jax.monitor.alarms import raise_alarms
from dapo_jax.parallel.processes import LastingFailure

logger = logging.getLogger(__name__)

MISMATCH_K3 = 1e-3  # old_logprob=auto recomputes beyond either of these two
MISMATCH_CLIPFRAC = 5e-3


@dataclass(frozen=True)
class Progress:
    """Where a run is, besides its parameters. Random draws have addresses, so no generator is saved."""

    step: int = 0  # training steps done
    recompute_logprobs: bool = False  # whether old_logprob=auto has fallen back to recomputing
    recompute_dtype: str = ""  # the model.dtype with which it fell back
    kl_coef: float = 0.0  # of the KL divergence in the reward
    kl_coef_of: str = ""  # the options that it started from
    groups_kept: int = 0
    groups_dropped: int = 0
    tokens_generated: int = 0
    tokens_trained: int = 0
    prompts: str = ""  # checksum of the training prompts
    mixture: list[list[Any]] = field(default_factory=list)  # of data.mixture: PromptOrder.parts
    stream: str = ""  # checksum of what is saved besides the models
    arrays: dict[str, str] = field(default_factory=dict)  # checksum of each array of the models, by its path
    loaded: dict[str, Any] = field(default_factory=dict)  # identity of each model that is loaded, by its option
    held_out: str = ""  # checksum of the held-out problems and of how they are measured
    nonfinite_in_a_row: int = 0  # latest steps in a row whose loss or gradient was not finite
    log_bytes: int = -1  # of train.log that belong to finished steps; -1 = not known
    alarms: dict[str, float] = field(default_factory=dict)  # what the next step is compared with, see monitor/alarms.py
    best: float | None = None  # trainer.best_metric at its best
    best_step: int = 0  # its step
    best_of: str = ""  # the metric that it is, and whether more or less is better
    quality: float | None = None  # the same metric after this step; None if it was not measured
    temperature: float | None = None  # rollout.temperature of the groups that are saved with it
    run: str = ""  # the run's id, see run_id.py
    workdir: str = ""  # of the run: an absolute path or an address
    started_at: float = 0.0  # Unix time of the run's first start; 0 = not known
    saved_at: float = 0.0  # Unix time of this checkpoint
    step_seconds: float = 0.0  # that the steps took which are done
    lost_seconds: float = 0.0  # from a checkpoint until a start has resumed from it, over all restarts
    solved: str = ""  # why the run has ended before its last step: its data is solved
    solved_with: str = ""  # the options of which that is true
    unrecorded: dict[str, Any] | None = None  # metrics and samples of the step until they are recorded


def of_held_out(metric: str) -> bool:
    """Whether trainer.best_metric measures held-out problems."""
    return not metric or metric.startswith("eval/")


def recomputes(config: Config, progress: Progress) -> bool:
    """Whether old log-probabilities come from the training forward pass instead of the sampler."""
    mode = config.actor.old_logprob
    fallen_back = progress.recompute_logprobs and progress.recompute_dtype in ("", config.model.dtype)
    fallen_back = fallen_back and not trains_on_older_samples(config.algorithm, config.trainer)
    return mode == "recompute" or (mode == "auto" and fallen_back)


def is_finite(metrics: Mapping[str, float]) -> bool:
    """Whether the losses and gradients of a step are."""
    losses = [metrics[name] for name in ("actor/loss", "critic/vf_loss") if name in metrics]
    skipped = [metrics[name] for name in ("actor/skipped_updates", "critic/skipped_updates") if name in metrics]
    return bool(np.all(np.isfinite(losses))) and not any(skipped)


def resumed_coefficient(algorithm: AlgorithmConfig, progress: Progress) -> Progress:
    """`progress` with the KL coefficient to resume with: the saved one if it was adapted from the same options."""
    if algorithm.kl_ctrl.type == "adaptive" and progress.kl_coef_of in ("", kl_coef_of(algorithm)):
        return progress
    return dataclasses.replace(progress, kl_coef=algorithm.kl_ctrl.kl_coef, kl_coef_of=kl_coef_of(algorithm))


def kl_coef_of(algorithm: AlgorithmConfig) -> str:
    """The options that a KL coefficient was adapted from."""
    control = algorithm.kl_ctrl
    return f"{control.type} {control.kl_coef} {algorithm.use_kl_in_reward}"


def advance(
    config: Config, progress: Progress, batch: Collected, metrics: dict[str, float]
) -> tuple[Progress, dict[str, float]]:
    """The progress after a training step with these metrics, and further ones: the KL in the reward, and alarms."""
    mismatch = metrics.get("rollout_corr/k3_kl", 0.0) > MISMATCH_K3 or (
        metrics.get("rollout_corr/first_clipfrac", 0.0) > MISMATCH_CLIPFRAC
    )
    older_policy = trains_on_older_samples(config.algorithm, config.trainer)
    if (groups := batch.experience) is not None:  # the first ones may be of the run as it was before it resumed
        older_policy |= bool((groups.versions < progress.step).any())
    mismatch = mismatch and not older_policy  # then they differ because an older policy sampled
    falls_back = mismatch and config.actor.old_logprob == "auto"
    if falls_back and not recomputes(config, progress):
        logger.warning(
            "sampling and training log-probabilities differ (k3 %.2e, clipped %.2e): old log-probabilities are "
            "recomputed from the next step on; model.dtype=float32 avoids the difference",
            metrics["rollout_corr/k3_kl"],
            metrics.get("rollout_corr/first_clipfrac", 0.0),
        )
    if falls_back:
        progress = dataclasses.replace(progress, recompute_logprobs=True, recompute_dtype=config.model.dtype)
    kl_coef, further = progress.kl_coef, dict[str, float]()
    if config.algorithm.use_kl_in_reward and batch.experience is not None:
        kl = batch.experience.sequence_kl
        further = {"actor/reward_kl_penalty": kl, "actor/reward_kl_penalty_coeff": kl_coef}
        control = config.algorithm.kl_ctrl
        if control.type == "adaptive":
            kl_coef = adapted_coefficient(
                kl_coef,
                kl,
                target_kl=control.target_kl,
                horizon=control.horizon,
                num_sequences=int(batch.experience.known.sum()),
            )
    ignored = {"rollout_corr/k3_kl"} if older_policy else set()
    compared = {name: value for name, value in (metrics | further).items() if name not in ignored}
    alarms, memory = raise_alarms(compared, progress.alarms, config.monitor.alarms, progress.step + 1)
    progress = dataclasses.replace(
        progress,
        step=progress.step + 1,
        kl_coef=kl_coef,
        groups_kept=progress.groups_kept + batch.num_kept,
        groups_dropped=progress.groups_dropped + batch.num_evaluated - batch.num_kept,
        tokens_generated=progress.tokens_generated + int(metrics["dynamic_sampling/generated_tokens"]),
        tokens_trained=progress.tokens_trained + int(metrics["dynamic_sampling/trained_tokens"]),
        nonfinite_in_a_row=0 if is_finite(metrics) else progress.nonfinite_in_a_row + 1,
        alarms=memory,
        quality=None,
        solved="",
    )
    return progress, further | alarms


def check_finite(trainer: TrainerConfig, workdir: str, progress: Progress) -> None:
    """Raises RuntimeError after trainer.max_nonfinite_steps steps in a row whose loss or gradient was not finite."""
    steps, most = progress.nonfinite_in_a_row, trainer.max_nonfinite_steps
    if steps >= most:
        raise LastingFailure(
            f"the loss or the gradient was not finite in {steps} steps in a row, up to step {progress.step} "
            f"(trainer.max_nonfinite_steps={most}); their updates were skipped, and their batches are in "
            f"{Path(workdir) / 'nonfinite'}: inspect them, change one of these, then rerun: lower "
            "actor.optim.lr, set model.dtype=float32, or raise trainer.max_nonfinite_steps to go on with other batches"
        )


def solved(progress: Progress, options: str, counts: Mapping[str, float]) -> Progress:
    """`progress` at the end of a run whose data is solved.

    Args:
        options: `solved_with` of the config.
        counts: of the step that could not be filled.
    """
    names = (f"dynamic_sampling/filtered_{kind}" for kind in ("all_correct", "all_wrong", "other"))
    right, *others = (int(counts[name]) for name in names)
    text = f"the data is solved: {right} of {right + sum(others)} dropped groups were all right"
    text += " before the first step: see whether the reward is too easy" * (not progress.step)
    return dataclasses.replace(progress, solved=text, solved_with=options)


def solved_with(config: Config) -> str:
    """A checksum of the options on which it depends whether there is more to learn."""
    options = config.data, config.rollout, config.reward, config.algorithm, config.trainer.total_training_steps
    return hashlib.sha256(repr((config.seed, *options)).encode()).hexdigest()[:16]


def best_of(trainer: TrainerConfig) -> str:
    """The metric that is best where it is largest or smallest, and which of the two."""
    return f"{trainer.best_metric_mode} {trainer.best_metric}"


def with_quality(trainer: TrainerConfig, progress: Progress, quality: float | None) -> Progress:
    """`progress` with the quality of its policy, and the best so far with its step: of equal ones the first.

    Args:
        quality: trainer.best_metric of this step's policy; None if it was not measured. NaN counts as not measured.
    """
    if quality is not None and not math.isfinite(quality):
        quality = None
    progress = dataclasses.replace(progress, quality=quality, best_of=best_of(trainer))
    better = max if trainer.best_metric_mode == "max" else min
    if quality is None or (progress.best is not None and better(quality, progress.best) == progress.best):
        return progress
    return dataclasses.replace(progress, best=quality, best_step=progress.step)


def without_best(progress: Progress) -> Progress:
    """`progress` of which it is not known how good its policies were."""
    return dataclasses.replace(progress, best=None, best_step=0, quality=None)


def begun(progress: Progress, run: str, workdir: str, *, start: float) -> Progress:
    """`progress` as a start of the run in `workdir` continues it; the time since its checkpoint is lost.

    Args:
        start: Unix time at which the command was called.
    """
    if progress.run != run or not progress.started_at:  # a new run, or the first start that keeps the time
        clock = {"started_at": start, "step_seconds": 0.0, "lost_seconds": 0.0}
    else:
        clock = {"lost_seconds": progress.lost_seconds + max(time.time() - progress.saved_at, 0.0)}
    return dataclasses.replace(progress, run=run, workdir=workdir, **clock)


def goodput(progress: Progress) -> dict[str, float]:
    """The share of the time since the run's first start that went into steps that count, and the seconds lost."""
    whole = max(time.time() - progress.started_at, progress.step_seconds, 1e-9)
    return {"perf/goodput": progress.step_seconds / whole, "time/lost": progress.lost_seconds}
