"""Device: AdamW or Muon with global-norm clipping; an update with a gradient that is not finite is skipped."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from dapo_jax.config.sections import ActorConfig, CriticConfig, OptimConfig
from dapo_jax.models.weights import UNTRAINED, Weight

MUON_RMS = 0.2  # of an update of Muon: as large as AdamW's, so that rates and decay can be the same (arXiv:2502.16982)


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


def init_state(params: Any, optim: OptimConfig, table: Sequence[Weight] = ()) -> TrainState:
    """A state with zero moments around `params`.

    Args:
        table: the weights of `params`, which says to Muon what a matrix is.
    """
    moments = _in_dtype(_transformation(optim, table).init(params), params, jnp.dtype(optim.moments_dtype))
    return TrainState(params, moments, jnp.int32(0), jnp.int32(0))


def apply_gradients(
    state: TrainState,
    gradients: Any,
    learning_rate: Any,
    options: ActorConfig | CriticConfig,
    table: Sequence[Weight] = (),
) -> tuple[TrainState, jax.Array]:
    """One optimizer step, and the gradients' global norm before clipping. Not finite: only `skipped` changes.

    Every parameter that is trained decays, as in PyTorch and verl.
    """
    norm = optax.global_norm(gradients)
    scale = jnp.minimum(1.0, options.grad_clip / jnp.maximum(norm, 1e-30))
    clipped = jax.tree.map(lambda gradient: gradient * scale, gradients)
    old = _in_dtype(state.moments, state.params, jnp.float32)
    directions, moments = _transformation(options.optim, table).update(clipped, old, state.params)
    if options.optim.moments_dtype == "bfloat16":
        moments = _rounded(moments, state.params, state.updates)

    def changed(path: Any, param: jax.Array, direction: jax.Array) -> jax.Array:
        return param if getattr(path[-1], "key", "") in UNTRAINED else param - learning_rate * direction

    params = jax.tree_util.tree_map_with_path(changed, state.params, directions)
    updated = TrainState(params, moments, state.updates + 1, state.skipped)
    refused = dataclasses.replace(state, skipped=state.skipped + 1)
    finite = jnp.isfinite(norm)
    return jax.tree.map(lambda new, old: jnp.where(finite, new, old), updated, refused), norm


def for_moments(moments: Any, params: Any, default: Any) -> Any:
    """For each leaf of `moments` the leaf of `params` that it belongs to; `default` for counts and constants.

    Args:
        params: a tree with the parameters' structure.
    """
    leaves = dict(jax.tree_util.tree_leaves_with_path(params))

    def found(path: tuple, _: Any) -> Any:
        return next((leaves[path[start:]] for start in range(len(path)) if path[start:] in leaves), default)

    return jax.tree_util.tree_map_with_path(found, moments)


def _transformation(optim: OptimConfig, table: Sequence[Weight]) -> optax.GradientTransformation:
    """Turns gradients into what is subtracted from the parameters, times the learning rate."""
    directions = optax.scale_by_adam(*optim.betas, eps=optim.eps)
    if optim.optimizer == "muon":
        directions = _with_muon(directions, table)
    return optax.chain(directions, optax.add_decayed_weights(optim.weight_decay))


def _with_muon(adam: optax.GradientTransformation, table: Sequence[Weight]) -> optax.GradientTransformation:
    """Muon for the matrices of layers, `adam` for all else (arXiv:2502.16982, equation 4)."""
    matrices = {weight.path: weight for weight in table if weight.matrix_axes is not None}

    def for_each(function: Callable[[Any, jax.Array], Any]) -> Callable[..., Any]:
        """A function of a tree: `function` of the matrix, or None, and the leaf at each place."""

        def at(path: tuple, leaf: jax.Array) -> Any:
            return function(matrices.get(tuple(key.key for key in path)), leaf)

        return lambda tree, _=None: jax.tree_util.tree_map_with_path(at, tree)

    axes = for_each(lambda matrix, _: optax.contrib.MuonDimensionNumbers(*matrix.matrix_axes))
    scaled = for_each(lambda matrix, update: MUON_RMS * max(matrix.hf_shape) ** 0.5 * update)
    muon = optax.chain(optax.contrib.scale_by_muon(weight_dimension_numbers=axes), optax.stateless(scaled))
    return optax.partition({"muon": muon, "adam": adam}, for_each(lambda matrix, _: "muon" if matrix else "adam"))


def _in_dtype(moments: Any, params: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda x, cast: x.astype(dtype) if cast else x, moments, _are_moments(moments, params))


def _are_moments(moments: Any, params: Any) -> Any:
    """Whether each leaf of `moments` belongs to a parameter."""
    return for_moments(moments, jax.tree.map(lambda _: True, params), False)


def _rounded(moments: Any, params: Any, updates: jax.Array) -> Any:
    """The moments in bfloat16, each rounded up or down at random so that its expectation is exact.

    Rounded to nearest, the second moment would stop moving: a step changes it by a thousandth, less than half the gap
    between neighbouring bfloat16 values.
    """
    leaves, structure = jax.tree.flatten(moments)
    is_moment = jax.tree.leaves(_are_moments(moments, params))
    key = jax.random.fold_in(jax.random.key(0), updates)

    def rounded(index: int, x: jax.Array) -> jax.Array:
        noise = jax.random.bits(jax.random.fold_in(key, index), x.shape, jnp.uint16).astype(jnp.uint32)
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + noise
        upper = jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32)
        return jnp.where(jnp.isfinite(x), upper, x).astype(jnp.bfloat16)

    of_both = enumerate(zip(leaves, is_moment, strict=True))
    return jax.tree.unflatten(structure, [rounded(index, x) if one else x for index, (x, one) in of_both])


def learning_rate(optim: OptimConfig, step: int, *, total_steps: int) -> float:
    """Learning rate of training step `step`, from 1: linear warm-up from lr / warmup_steps, then the scheduler.

    All mini-batches of a training step share it. Before step 1, where nothing is trained, it is 0. A cosine ends at
    min_lr_ratio * lr in the last step; without a minimum it reaches 0 one step later, so that the last one learns.
    """
    if step < 1:
        return 0.0
    warmup_steps = optim.lr_warmup_steps
    if step <= warmup_steps:
        return optim.lr * step / warmup_steps
    if optim.lr_scheduler_type == "constant":
        return optim.lr
    decay_steps = max(total_steps - warmup_steps, 1) + (optim.min_lr_ratio == 0)
    schedule = optax.cosine_decay_schedule(optim.lr, decay_steps, alpha=optim.min_lr_ratio)
    return float(np.asarray(schedule(step - warmup_steps)))
