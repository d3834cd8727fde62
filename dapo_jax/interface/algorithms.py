"""Host: the paper's functions on plain arrays, with DAPO's values as defaults.

They are those that a run uses (dynamic_sampling/group_filter.py, algorithms/), without its containers.
"""

from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dapo_jax.algorithms.advantages import ESTIMATORS
from dapo_jax.algorithms.aggregation import token_weights, weighted_sum
from dapo_jax.algorithms.arguments import chosen, needs, required
from dapo_jax.algorithms.policy_loss import LOSSES
from dapo_jax.config.bounds import bounds_of
from dapo_jax.config.sections import ActorConfig, AlgorithmConfig, FilterGroupsConfig
from dapo_jax.dynamic_sampling import group_filter
from dapo_jax.errors import InputError
from dapo_jax.learner.actor import loss_options
from dapo_jax.rewards.shaping import place_rewards

BY_LENGTH = "opo", "reinforce_plus_plus_baseline"  # estimators to which a response's tokens matter


def keep_groups(scores: Any, **options: Any) -> np.ndarray:
    """Which groups have something to compare (DAPO, arXiv:2503.14476, equation 11).

    Args:
        scores: [Q, G] of G responses to each of Q prompts.
        options: of `algorithm.filter_groups`: rule="std" (the default), std_threshold=0.0, ...

    Returns:
        [Q] bool: True where the scores differ; compared exactly unless a threshold is given.
    """
    scores = _by_group("scores", scores)
    num_groups, num_samples = scores.shape
    group_ids = jnp.repeat(jnp.arange(num_groups), num_samples)
    statistics = group_filter.group_statistics(scores.reshape(-1), group_ids, num_groups=num_groups)
    read = "rule", "keep_singletons", *group_filter.RULES.get(options.get("rule", FilterGroupsConfig.rule), ())
    return np.asarray(group_filter.keep_groups(statistics, _options(FilterGroupsConfig, options, read)))


def group_advantages(rewards: Any, *, estimator: str = "grpo", lengths: Any = None, **options: Any) -> np.ndarray:
    """How much better each response is than the others to its prompt (DAPO, equation 9).

        A = (reward - mean of the group) / (sample standard deviation of the group + 1e-6)

    Args:
        rewards: [Q, G].
        estimator: of docs/algorithms.md; one that compares whole responses: "grpo", "rloo", "grpo_passk", "gpg", ...
        lengths: [Q, G] tokens of each response, by which "opo" and "reinforce_plus_plus_baseline" weigh it.
        options: of `algorithm` that the estimator reads, such as norm_adv_by_std_in_grpo=False (Dr. GRPO).

    Returns:
        [Q, G] float32.
    """
    rewards = _by_group("rewards", rewards)
    num_groups, num_samples = rewards.shape
    group_ids = jnp.repeat(jnp.arange(num_groups), num_samples)
    tokens = jnp.ones_like(rewards) if lengths is None else _by_group("lengths", lengths)
    if tokens.shape != rewards.shape or (tokens < 1).any():
        raise InputError(
            f"lengths {tokens.shape} must be at least 1 for each of the rewards {rewards.shape}: correct them"
        )
    mask = jnp.arange(int(tokens.max())) < tokens.reshape(-1, 1)
    arrays = {"rewards": place_rewards(rewards.reshape(-1), mask), "mask": mask, "group_ids": group_ids}
    arrays["num_groups"] = num_groups
    fitting = [name for name, one in ESTIMATORS.items() if "num_groups" in required(one) <= arrays.keys()]
    if estimator not in fitting:
        raise InputError(f"estimator={estimator!r} must be one of {', '.join(fitting)}: choose another")
    if lengths is None and estimator in BY_LENGTH:
        raise InputError(f"estimator={estimator!r} weighs responses by their tokens: give lengths, [Q, G] of these")
    function, settings = ESTIMATORS[estimator], vars(AlgorithmConfig())
    settings = vars(_options(AlgorithmConfig, options, chosen(function, settings)))
    found, _ = function(**arrays, **chosen(function, settings))
    return np.asarray(found[:, 0]).reshape(rewards.shape)


def policy_loss(
    logprobs: jax.Array,
    old_logprobs: Any,
    advantages: Any,
    mask: Any,
    *,
    loss: str = "vanilla",
    aggregation: str = "token-mean",
    group_ids: Any = None,
    **options: Any,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The decoupled clip objective (DAPO, equation 8), to minimise; it can be differentiated and jitted.

    Args:
        logprobs: [B, R] of the sampled tokens, under the policy that learns.
        old_logprobs: [B, R], under the policy that sampled.
        advantages: [B] of responses, or [B, R] of tokens.
        mask: [B, R] tokens to train on: bool, or numbers of which all but 0 count as True.
        loss: a name of docs/algorithms.md: "vanilla" (clip-higher), "gspo", "cispo", "sapo", ...
        aggregation: "token-mean", "seq-mean-token-mean" (GRPO), "group-token-mean", ...
        group_ids: [B] the prompt of each row, for "group-token-mean".
        options: of `actor`: clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=10.0, ...

    Returns:
        The loss, a scalar, and the loss's metrics, such as the share of clipped tokens `pg_clipfrac`.
    """
    fitting = [name for name, one in LOSSES.items() if not needs(one, "selected")]
    if loss not in fitting:
        raise InputError(f"loss={loss!r} must be one of {', '.join(fitting)}: choose another")
    function, mask = LOSSES[loss], jnp.asarray(mask) != 0
    known = [name for name in loss_options(ActorConfig()) if needs(function, name)]
    if unknown := set(options) - set(known):
        raise InputError(f"loss={loss!r} has no {', '.join(unknown)}: its options are {', '.join(known) or 'none'}")
    _check_bounds(ActorConfig, options)
    given = {"logprobs": logprobs, "old_logprobs": old_logprobs, "advantages": advantages, "group_ids": group_ids}
    arrays = {name: jnp.asarray(values) for name, values in given.items() if values is not None}
    shapes = {"advantages": (mask.shape, mask.shape[:1]), "group_ids": (mask.shape[:1],)}
    if wrong := [name for name, array in arrays.items() if array.shape not in shapes.get(name, (mask.shape,))]:
        found = ", ".join(f"{name} {arrays[name].shape}" for name in wrong)
        raise InputError(
            f"{found} must have the shape of mask, {mask.shape}, or a number for each of its rows: correct it"
        )
    if aggregation == "group-token-mean" and group_ids is None:
        raise InputError("aggregation='group-token-mean' needs group_ids, the prompt of each row: give them")
    if arrays["advantages"].ndim == 1:
        arrays["advantages"] = jnp.broadcast_to(arrays["advantages"][:, None], mask.shape)
    # 0 on padding before the loss: 0 times a gradient that is not finite is not finite
    tokens = [jnp.where(mask, arrays[name], 0) for name in ("logprobs", "old_logprobs", "advantages")]
    weights = {"importance_weights": jnp.ones_like(tokens[0])} if needs(function, "importance_weights") else {}
    token_loss, metrics = function(*tokens, mask, **options, **weights)
    ids = arrays.get("group_ids", jnp.arange(len(mask)))
    shares = token_weights(mask, ids, aggregation, scale_factor=float(mask.shape[-1]))
    means = {name: metric.total / jnp.maximum(metric.count, 1) for name, metric in metrics.items()}
    return weighted_sum(token_loss, shares, mask), means


def _by_group(name: str, values: Any) -> jax.Array:
    try:
        array = jnp.asarray(values, jnp.float32)
    except (TypeError, ValueError) as error:
        raise InputError(f"{name} must be numbers, as many for each prompt, but {error}: correct them") from error
    if array.ndim != 2:
        raise InputError(f"{name} has the shape {array.shape}: give one row per prompt and one column per response")
    if not jnp.isfinite(array).all():
        raise InputError(f"{name} hold a number that is not finite: correct the reward, or leave its group out")
    return array


def _options(section: Any, given: Mapping[str, Any], read: Collection[str]) -> Any:
    """A section of the config with these options. InputError for one that is not `read`."""
    if unread := sorted(set(given) - set(read)):
        raise InputError(f"unknown options {', '.join(unread)}: those that are read are {', '.join(read) or 'none'}")
    _check_bounds(section, given)
    return section(**given)


def _check_bounds(section: type, given: Mapping[str, Any]) -> None:
    """InputError if a number breaks the rule of the option of its name in a section of the config."""
    numbers = {name: value for name, value in given.items() if isinstance(value, int | float)}
    for key, bound in bounds_of(section):
        if (name := key.rpartition(".")[2]) in numbers and (problems := bound.problems(name, numbers[name])):
            raise InputError(f"{problems[0]}: correct it")
