"""Device: the estimator CPO: what a hint with the solution would have changed about each token."""

import math

import jax
import jax.numpy as jnp

from dapo_jax.algorithms.group_relative import Estimates, normalised, same_for_every_token, scores_of
from dapo_jax.algorithms.groups import Groups
from dapo_jax.errors import InputError

CPO_METHODS = ("mi", "mi_clamp_unify_difficulty", "negonly_mi3", "seq_kl", "negonly_seq_kl")


def cpo(
    rewards: jax.Array,
    mask: jax.Array,
    group_ids: jax.Array,
    *,
    num_groups: int,
    norm_adv_by_std_in_grpo: bool,
    logprobs: jax.Array,
    hint_logprobs: jax.Array,
    entropy: jax.Array,
    vocab_size: int,
    wrap_method: str,
    cpo_lambda: float,
    pos_alpha: float,
    neg_alpha: float,
    mi_alpha: float,
    kl_alpha: float,
) -> Estimates:
    """GRPO's advantages plus what a hint would have changed about each token (CPO).

    With l the log-probability of a token, and l' its log-probability after a prompt that also holds the reference
    solution: kl = exp(l') (l' - l), ratio = exp(l' - l) clamped to [1 / cpo_lambda, cpo_lambda], uncertainty =
    entropy / log V. The difficulty of a group is 1 if all its scores are positive, -1 if none is, else 0.
    `wrap_method` names what is added:

        mi                         mi_alpha kl
        mi_clamp_unify_difficulty  alpha ratio kl, alpha = pos_alpha, mi_alpha or neg_alpha at difficulty 1, 0 or -1
        negonly_mi3                neg_alpha ratio kl (1 - uncertainty), unless the difficulty is 1
        seq_kl                     kl_alpha times the sum of kl over the response, for each of its tokens
        negonly_seq_kl             the same, unless the difficulty is 1

    Its fifteen parameters are arrays and the options of algorithm.cpo, which `chosen` passes by name.

    Args:
        logprobs, hint_logprobs: [B, R] under the policy that sampled, after the prompt without and with the hint.
        entropy: [B, R] of the distribution without the hint.

    Raises:
        ValueError: an unknown method.
    """
    groups, scores = Groups(group_ids, num_groups), scores_of(rewards, mask)
    advantages, _ = same_for_every_token(normalised(scores, groups, by_deviation=norm_adv_by_std_in_grpo), mask)
    all_positive = (groups.lowest(scores) > 0)[:, None]
    none_positive = (groups.highest(scores) <= 0)[:, None]
    difference = jnp.where(mask, hint_logprobs - logprobs, 0.0)
    kl = jnp.where(mask, jnp.exp(hint_logprobs) * difference, 0.0)
    ratio = jnp.exp(jnp.clip(difference, -math.log(cpo_lambda), math.log(cpo_lambda)))
    if wrap_method == "mi":
        added = mi_alpha * kl
    elif wrap_method == "mi_clamp_unify_difficulty":
        alpha = jnp.where(all_positive, pos_alpha, jnp.where(none_positive, neg_alpha, mi_alpha))
        added = alpha * ratio * kl
    elif wrap_method == "negonly_mi3":
        certainty = 1 - entropy / math.log(vocab_size)
        added = jnp.where(all_positive, 0.0, neg_alpha * ratio * kl * certainty)
    elif wrap_method in ("seq_kl", "negonly_seq_kl"):
        added = kl_alpha * jnp.sum(kl, axis=-1, keepdims=True)
        if wrap_method == "negonly_seq_kl":
            added = jnp.where(all_positive, 0.0, added)
    else:
        raise InputError(f"algorithm.cpo.wrap_method={wrap_method!r} must be one of {', '.join(CPO_METHODS)}")
    advantages = advantages + jnp.where(mask, added, 0.0)
    return advantages, advantages
