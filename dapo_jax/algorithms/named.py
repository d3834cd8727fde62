"""Host: policy losses and advantage estimators by name: this package's, or functions of your own."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from dapo_jax.algorithms.advantages import ESTIMATORS
from dapo_jax.algorithms.arguments import chosen, required
from dapo_jax.algorithms.group_relative import Estimates, grpo
from dapo_jax.algorithms.policy_loss import LOSSES
from dapo_jax.algorithms.ratios import TokenLoss
from dapo_jax.config.own_functions import is_own, load_named
from dapo_jax.data.containers import Mean
from dapo_jax.errors import InputError

LOSS, ESTIMATOR = "actor.policy_loss.loss_mode", "algorithm.adv_estimator"


@functools.cache  # loaded once, so that a run goes on with what it has begun with; `reload` is for the next one
def named_loss(name: str) -> Callable[..., TokenLoss]:
    """The policy loss of this name (policy_loss.py). One of your own may return the loss [B, R] alone, and metrics as
    arrays [B, R], of which the mean over `mask` is taken.

    Raises:
        InputError: your own does not load.
    """
    if not is_own(name):
        return LOSSES[name]
    function = load_named(LOSS, name)

    @functools.wraps(function)
    def loss(logprobs: jax.Array, old: jax.Array, advantages: jax.Array, mask: jax.Array, **rest: Any) -> TokenLoss:
        found = function(logprobs, old, advantages, mask, **rest)
        token_loss, metrics = found if isinstance(found, tuple) else (found, {})
        _check_shape(LOSS, name, token_loss, mask.shape)
        means = {
            key: value if isinstance(value, Mean) else Mean.of(jnp.broadcast_to(value, mask.shape), mask)
            for key, value in metrics.items()
        }
        return token_loss, jax.lax.stop_gradient(means)

    return loss


@functools.cache
def named_estimator(name: str) -> Callable[..., Estimates]:
    """The advantage estimator of this name (advantages.py); grpo for a name that the config's check refuses.

    One of your own may return the advantages alone, and one number [B] per response.

    Raises:
        InputError: your own does not load.
    """
    if not is_own(name):
        return ESTIMATORS.get(name, grpo)
    function = load_named(ESTIMATOR, name)

    @functools.wraps(function)
    def estimator(rewards: jax.Array, mask: jax.Array, group_ids: jax.Array, **rest: Any) -> Estimates:
        found = function(rewards, mask, group_ids, **rest)
        advantages, returns = found if isinstance(found, tuple) else (found, found)
        if jnp.ndim(advantages) == 1:
            advantages, returns = (jnp.broadcast_to(one[:, None], mask.shape) for one in (advantages, returns))
        _check_shape(ESTIMATOR, name, advantages, mask.shape)
        return jnp.where(mask, advantages, 0.0), jnp.where(mask, returns, 0.0)

    return estimator


def reload() -> None:
    """Lets the next use of a function of your own read its file again."""
    named_loss.cache_clear()
    named_estimator.cache_clear()


def own_problem(option: str, name: str, options: Mapping[str, Any]) -> str:
    """What is wrong with a function of your own; "" if nothing is. It is traced, which touches no device.

    Args:
        options: those that it may read, by name.
    """
    tokens, mask, numbers = (jax.ShapeDtypeStruct((4, 3), kind) for kind in (jnp.float32, jnp.bool_, jnp.int32))
    row, parts = jax.ShapeDtypeStruct((4,), jnp.float32), jax.ShapeDtypeStruct((4, 2), jnp.float32)
    if option == LOSS:
        find, arrays = named_loss, (tokens, tokens, tokens, mask)
        further = {"sequences": numbers, "importance_weights": tokens}
    else:
        find, arrays = named_estimator, (tokens, mask, jax.ShapeDtypeStruct((4,), jnp.int32))
        further = dict.fromkeys(("values", "hint_logprobs", "logprobs", "entropy", "sum_pi_squared"), tokens)
        further |= {"reward_baselines": row, "accuracy": row, "reward_parts": parts}
        options = {"num_groups": 2, "vocab_size": 8, **options}
    given = f"{option}={name!r}"
    try:
        function = find(name)
        later = [*inspect.signature(function).parameters][len(arrays) :]
        if unknown := [one for one in later if one in required(function) and one not in {*further, *options}]:
            return (
                f"{given} needs {', '.join(unknown)}, which nothing gives: after its {len(arrays)} arrays a parameter "
                f"must be one of {', '.join(further)}, a setting such as {next(iter(options))}, or have a default"
            )
        bound = functools.partial(function, **chosen(function, options))
        jax.eval_shape(bound, *arrays, **chosen(function, further))
    except InputError as error:
        return str(error)
    except Exception as error:  # a function of your own can raise anything
        return f"{given} fails with {type(error).__name__}: {str(error).partition(chr(10))[0]}: correct it"
    return ""


def _check_shape(option: str, name: str, found: Any, shape: tuple[int, ...]) -> None:
    if jnp.shape(found) != shape:
        raise InputError(
            f"{option}={name!r} must return a number for each token, of the shape {shape} that its arrays have, not "
            f"{jnp.shape(found)}: leave sums and means to the trainer (actor.loss_agg_mode)"
        )
