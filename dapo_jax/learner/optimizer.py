"""Device: AdamW with global-norm clipping; an update with a gradient that is not finite is skipped."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW (arXiv:1711.05101); every parameter decays, as in PyTorch and so in verl."""

    betas: tuple[float, float]
    eps: float
    weight_decay: float
    grad_clip: float  # global norm


@struct.dataclass
class TrainState:
    """What an update changes, all of it float32 and sharded like the parameters."""

    params: Any
    moments: Any  # optax state
    updates: Any  # scalar int32, optimizer steps taken
    skipped: Any  # scalar int32, optimizer steps refused because of a gradient that was not finite


def _transformation(settings: OptimizerSettings) -> optax.GradientTransformation:
    return optax.chain(
        optax.scale_by_adam(*settings.betas, eps=settings.eps), optax.add_decayed_weights(settings.weight_decay)
    )


def init_state(params: Any, settings: OptimizerSettings) -> TrainState:
    """A state with zero moments around `params`."""
    return TrainState(params, _transformation(settings).init(params), jnp.int32(0), jnp.int32(0))


def apply_gradients(
    state: TrainState, gradients: Any, learning_rate: Any, settings: OptimizerSettings
) -> tuple[TrainState, jax.Array]:
    """One AdamW step, and the gradients' global norm before clipping. Not finite: only `skipped` changes."""
    norm = optax.global_norm(gradients)
    scale = jnp.minimum(1.0, settings.grad_clip / jnp.maximum(norm, 1e-30))
    clipped = jax.tree.map(lambda gradient: gradient * scale, gradients)
    directions, moments = _transformation(settings).update(clipped, state.moments, state.params)
    params = jax.tree.map(lambda param, direction: param - learning_rate * direction, state.params, directions)
    updated = TrainState(params, moments, state.updates + 1, state.skipped)
    refused = dataclasses.replace(state, skipped=state.skipped + 1)
    finite = jnp.isfinite(norm)
    return jax.tree.map(lambda new, old: jnp.where(finite, new, old), updated, refused), norm


def learning_rate(
    step: int, *, lr: float, warmup_steps: int, scheduler: str, total_steps: int, min_ratio: float
) -> float:
    """Learning rate of training step `step`, from 1: linear warm-up from lr / warmup_steps, then the scheduler.

    All mini-batches of a training step share it.
    """
    if step <= warmup_steps:
        return lr * step / warmup_steps
    if scheduler == "constant":
        return lr
    decay_steps = max(total_steps - warmup_steps, 1)
    schedule = optax.cosine_decay_schedule(lr, decay_steps, alpha=min_ratio)
    return float(np.asarray(schedule(step - warmup_steps)))
