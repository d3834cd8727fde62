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
    """AdamW (arXiv:1711.05101); every parameter decays, as in PyTorch and verl."""

    betas: tuple[float, float]
    eps: float
    weight_decay: float
    grad_clip: float  # global norm
    moments_dtype: Any = jnp.float32  # of the stored moments
    offload: bool = False  # keep the moments in host memory between updates


@struct.dataclass
class TrainState:
    """What an update changes, sharded like the parameters."""

    params: Any  # float32
    moments: Any  # optax state
    updates: Any  # scalar int32, optimizer steps taken
    skipped: Any  # scalar int32, optimizer steps skipped because a gradient was not finite


@struct.dataclass
class Models:
    """The state of each model that is trained; a checkpoint holds all of it."""

    actor: TrainState
    critic: TrainState | None = None


def _transformation(settings: OptimizerSettings) -> optax.GradientTransformation:
    return optax.chain(
        optax.scale_by_adam(*settings.betas, eps=settings.eps), optax.add_decayed_weights(settings.weight_decay)
    )


def init_state(params: Any, settings: OptimizerSettings) -> TrainState:
    """A state with zero moments around `params`."""
    moments = jax.tree.map(
        lambda x: x.astype(settings.moments_dtype) if _is_moment(x) else x, _transformation(settings).init(params)
    )
    return TrainState(params, moments, jnp.int32(0), jnp.int32(0))


def _is_moment(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def apply_gradients(
    state: TrainState, gradients: Any, learning_rate: Any, settings: OptimizerSettings
) -> tuple[TrainState, jax.Array]:
    """One AdamW step, and the gradients' global norm before clipping. Not finite: only `skipped` changes."""
    norm = optax.global_norm(gradients)
    scale = jnp.minimum(1.0, settings.grad_clip / jnp.maximum(norm, 1e-30))
    clipped = jax.tree.map(lambda gradient: gradient * scale, gradients)
    old = jax.tree.map(lambda x: x.astype(jnp.float32) if _is_moment(x) else x, state.moments)
    directions, moments = _transformation(settings).update(clipped, old, state.params)
    if settings.moments_dtype == jnp.bfloat16:
        moments = _rounded(moments, state.updates)
    params = jax.tree.map(lambda param, direction: param - learning_rate * direction, state.params, directions)
    updated = TrainState(params, moments, state.updates + 1, state.skipped)
    refused = dataclasses.replace(state, skipped=state.skipped + 1)
    finite = jnp.isfinite(norm)
    return jax.tree.map(lambda new, old: jnp.where(finite, new, old), updated, refused), norm


def _rounded(moments: Any, updates: jax.Array) -> Any:
    """The moments in bfloat16, each rounded up or down at random so that its expectation is exact.

    Rounded to nearest, the second moment would stop moving: a step changes it by a thousandth, less than half the gap
    between neighbouring bfloat16 values.
    """
    leaves, structure = jax.tree.flatten(moments)
    key = jax.random.fold_in(jax.random.key(0), updates)

    def rounded(index: int, x: jax.Array) -> jax.Array:
        if not _is_moment(x):
            return x
        noise = jax.random.bits(jax.random.fold_in(key, index), x.shape, jnp.uint16).astype(jnp.uint32)
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + noise
        upper = jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32)
        return jnp.where(jnp.isfinite(x), upper, x).astype(jnp.bfloat16)

    return jax.tree.unflatten(structure, [rounded(index, leaf) for index, leaf in enumerate(leaves)])


def learning_rate(
    step: int, *, lr: float, warmup_steps: int, scheduler: str, total_steps: int, min_ratio: float
) -> float:
    """Learning rate of training step `step`, from 1: linear warm-up from lr / warmup_steps, then the scheduler.

    All mini-batches of a training step share it. Before step 1, where nothing is trained, it is 0.
    """
    if step < 1:
        return 0.0
    if step <= warmup_steps:
        return lr * step / warmup_steps
    if scheduler == "constant":
        return lr
    decay_steps = max(total_steps - warmup_steps, 1)
    schedule = optax.cosine_decay_schedule(lr, decay_steps, alpha=min_ratio)
    return float(np.asarray(schedule(step - warmup_steps)))
