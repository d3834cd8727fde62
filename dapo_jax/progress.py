"""Host: where a run is, besides its parameters."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dapo_jax.config.derived import trains_on_older_samples
from dapo_jax.config.sections import Config


@dataclass(frozen=True)
class Progress:
    """Where a run stands, beside its parameters. Random draws have addresses, so no generator is saved."""

    step: int = 0  # training steps done
    recompute_logprobs: bool = False  # whether old_logprob=auto has fallen back to recomputing
    recompute_dtype: str = ""  # the model.dtype with which it has
    kl_coef: float = 0.0  # of the KL divergence in the reward
    kl_coef_of: str = ""  # the options that it began with
    groups_kept: int = 0
    groups_dropped: int = 0
    tokens_generated: int = 0
    tokens_trained: int = 0
    prompts: str = ""  # checksum of the training prompts
    stream: str = ""  # checksum of what is saved beside the models
    nonfinite_in_a_row: int = 0  # last steps whose loss or gradient was not finite
    log_bytes: int = -1  # of train.log that belong to the steps done; -1 = not known
    alarms: dict[str, float] = field(default_factory=dict)  # what the next step is compared with, see monitor/alarms.py
    best: float | None = None  # trainer.best_metric at its best
    best_step: int = 0  # when it was
    best_of: str = ""  # the metric that it is, and whether more or less is better
    unrecorded: dict[str, Any] | None = None  # metrics and samples of the step, as long as they are not recorded


def recomputes(config: Config, progress: Progress) -> bool:
    """Whether old log-probabilities come from the training forward pass instead of the sampler."""
    mode = config.actor.old_logprob
    fallen_back = progress.recompute_logprobs and progress.recompute_dtype in ("", config.model.dtype)
    fallen_back = fallen_back and not trains_on_older_samples(config)
    return mode == "recompute" or (mode == "auto" and fallen_back)


def is_finite(metrics: Mapping[str, float]) -> bool:
    """Whether the losses and gradients of a step are."""
    losses = [metrics[name] for name in ("actor/loss", "critic/vf_loss") if name in metrics]
    skipped = [metrics[name] for name in ("actor/skipped_updates", "critic/skipped_updates") if name in metrics]
    return bool(np.all(np.isfinite(losses))) and not any(skipped)


def first_coefficient(config: Config, progress: Progress) -> Progress:
    """`progress` with the coefficient of the KL divergence that the config begins with."""
    return dataclasses.replace(progress, kl_coef=config.algorithm.kl_ctrl.kl_coef, kl_coef_of=kl_coef_of(config))


def resumed_coefficient(config: Config, progress: Progress) -> Progress:
    """`progress` with the coefficient to go on with: the saved one if it was adapted as the config says."""
    if config.algorithm.kl_ctrl.type == "adaptive" and progress.kl_coef_of in ("", kl_coef_of(config)):
        return progress
    return first_coefficient(config, progress)


def kl_coef_of(config: Config) -> str:
    """What a coefficient of the KL divergence has been adapted from, and how."""
    control = config.algorithm.kl_ctrl
    return f"{control.type} {control.kl_coef} {config.algorithm.use_kl_in_reward}"
