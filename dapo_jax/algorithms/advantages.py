"""Device: how much better a response, or a token of it, is than expected.

ESTIMATORS names every estimator. All of them take

    rewards    [B, R] float32, reward of each token
    mask       [B, R] bool, response tokens; the result is 0 elsewhere
    group_ids  [B] int32 in [0, num_groups), the prompt of each row; rows with another id are padding

and return (advantages, returns), [B, R] each: returns are what a value function would be fitted to. Whatever else an
estimator needs, arrays (`values`, `reward_baselines`, ...) or options of config.algorithm, is a parameter of that name.
To add one: write the function, and its line in ESTIMATORS.

Difference from verl: estimators that compare within a group and do not whiten give exactly 0 to a group of several
equal scores. In verl a rounding error of the mean can remain, which grpo then divides by a tiny deviation.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from dapo_jax.algorithms.groups import Groups
from dapo_jax.errors import InputError

EPSILON = 1e-6
Estimates = tuple[jax.Array, jax.Array]


def grpo(
    rewards: jax.Array,
    mask: jax.Array,
    group_ids: jax.Array,
    *,
    num_groups: int,
    norm_adv_by_std_in_grpo: bool = True,
) -> Estimates:
    """Group-relative advantages (GRPO, arXiv:2402.03300, section 4.1; DAPO, arXiv:2503.14476, equation 9).

        A = (score - mean of the group) / (sample standard deviation of the group + 1e-6)

    The only response of a group gets its score.

    Args:
        norm_adv_by_std_in_grpo: False leaves out the division (Dr. GRPO, arXiv:2503.20783).
    """
    groups, scores = Groups(group_ids, num_groups), _scores(rewards, mask)
    centred = groups.centred(scores)
    scaled = centred / (groups.deviation(scores) + EPSILON) if norm_adv_by_std_in_grpo else centred
    return _same_for_every_token(scaled, mask)


def grpo_passk(
    rewards: jax.Array,
    mask: jax.Array,
    group_ids: jax.Array,
    *,
    num_groups: int,
    norm_adv_by_std_in_grpo: bool = True,
) -> Estimates:
    """Only the best response of a group has an advantage: its lead over the second best (arXiv:2503.19595).

    It is divided by the group's sample standard deviation + 1e-6 if `norm_adv_by_std_in_grpo`. Ties and groups of
    one response get 0.
    """
    groups, scores = Groups(group_ids, num_groups), _scores(rewards, mask)
    best = scores == groups.highest(scores)
    alone = groups.sum(best.astype(scores.dtype)) == 1
    second = groups.highest(jnp.where(best, -jnp.inf, scores))
    lead = jnp.where(best & alone & ~groups.single, scores - second, 0.0)
    if norm_adv_by_std_in_grpo:
        lead = lead / (groups.deviation(scores) + EPSILON)
    return _same_for_every_token(lead, mask)


def rloo(rewards: jax.Array, mask: jax.Array, group_ids: jax.Array, *, num_groups: int) -> Estimates:
    """Score minus the mean score of the other responses to the prompt (RLOO, arXiv:2402.14740, equation 11).

    The only response of a group gets its score.
    """
    groups, scores = Groups(group_ids, num_groups), _scores(rewards, mask)
    return _same_for_every_token(groups.centred(scores) * groups.count / jnp.maximum(groups.count - 1, 1), mask)


def opo(rewards: jax.Array, mask: jax.Array, group_ids: jax.Array, *, num_groups: int) -> Estimates:
    """Score minus the length-weighted mean score of the group (OPO, arXiv:2505.23585, equation 6).

    The only response of a group gets its score.
    """
    groups, scores = Groups(group_ids, num_groups), _scores(rewards, mask)
    lengths = jnp.sum(mask, axis=-1, dtype=jnp.float32)
    baseline = groups.sum(lengths * scores) / jnp.maximum(groups.sum(lengths), 1)
    centred = scores - jnp.where(groups.single, 0.0, baseline)
    return _same_for_every_token(jnp.where(groups.uniform(scores), 0.0, centred), mask)


def gpg(rewards: jax.Array, mask: jax.Array, group_ids: jax.Array, *, num_groups: int) -> Estimates:
    """Centred scores, divided by the share of rows with a score other than 0 (GPG, arXiv:2504.02546, equation 8).

    The only response of a group gets its score.
    """
    groups, scores = Groups(group_ids, num_groups), _scores(rewards, mask)
    scale = jnp.sum(groups.real) / jnp.maximum(jnp.sum((scores != 0) & groups.real), 1)
    return _same_for_every_token(scale * groups.centred(scores), mask)


def reinforce_plus_plus(rewards: jax.Array, mask: jax.Array, group_ids: jax.Array, *, gamma: float) -> Estimates:
    """Discounted reward to go, whitened over all tokens of the batch (REINFORCE++, arXiv:2501.03262, equation 6)."""
    returns = _reward_to_go(rewards, mask, gamma)
    return jnp.where(mask, whiten(returns, mask), 0.0), returns


def reinforce_plus_plus_baseline(
    rewards: jax.Array, mask: jax.Array, group_ids: jax.Array, *, num_groups: int
) -> Estimates:
    """Score minus the group's mean, whitened over all tokens of the batch (arXiv:2501.03262, section 3.3).

    The only response of a group keeps its score before whitening.
    """
    groups, scores = Groups(group_ids, num_groups), _scores(rewards, mask)
    centred = groups.centred(scores)
    values = jnp.where(mask, whiten(jnp.broadcast_to(centred[:, None], mask.shape), mask), 0.0)
    return values, values


def remax(rewards: jax.Array, mask: jax.Array, group_ids: jax.Array, *, reward_baselines: jax.Array) -> Estimates:
    """Reward to go minus the reward of the prompt's greedy response (ReMax, arXiv:2310.10505, equation 5).

    Args:
        reward_baselines: [B] score of the greedy response to the row's prompt.
    """
    returns = _reward_to_go(rewards, mask, 1.0)
    return jnp.where(mask, returns - reward_baselines[:, None], 0.0), returns


def gae(
    rewards: jax.Array, mask: jax.Array, group_ids: jax.Array, *, values: jax.Array, gamma: float, lam: float
) -> Estimates:
    """Generalised advantage estimation (arXiv:1506.02438, equation 16), whitened over all tokens of the batch.

        delta_t = r_t + gamma V_{t+1} - V_t,   A_t = delta_t + gamma lam A_{t+1},   returns = A + V before whitening

    After the last token of a response the value is 0.

    Args:
        values: [B, R] the critic's value of the state in which each token was drawn.
    """

    def step(carry, column):
        next_value, next_advantage = carry
        reward, value, real = column
        advantage = reward + gamma * next_value - value + gamma * lam * next_advantage
        carry = jnp.where(real, value, next_value), jnp.where(real, advantage, next_advantage)
        return carry, carry[1]

    start = jnp.zeros_like(rewards[:, 0]), jnp.zeros_like(rewards[:, 0])
    _, columns = jax.lax.scan(step, start, (rewards.T, values.T, mask.T), reverse=True)
    advantages = columns.T
    return jnp.where(mask, whiten(advantages, mask), 0.0), jnp.where(mask, advantages + values, 0.0)


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
    advantages, _ = grpo(
        rewards, mask, group_ids, num_groups=num_groups, norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo
    )
    groups, scores = Groups(group_ids, num_groups), _scores(rewards, mask)
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


ESTIMATORS: dict[str, Callable[..., Estimates]] = {
    "grpo": grpo,
    "dapo": grpo,
    "grpo_passk": grpo_passk,
    "rloo": rloo,
    "opo": opo,
    "gpg": gpg,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
    "gae": gae,
    "cpo": cpo,
}


def whiten(values: jax.Array, mask: jax.Array) -> jax.Array:
    """`values` shifted and scaled to mean 0 and sample variance 1 (+ 1e-8) over the tokens of `mask`."""
    count = jnp.sum(mask)
    mean = jnp.sum(values, where=mask) / jnp.maximum(count, 1)
    variance = jnp.sum(jnp.square(values - mean), where=mask) / jnp.maximum(count - 1, 1)
    return (values - mean) * jax.lax.rsqrt(variance + 1e-8)


def _scores(rewards: jax.Array, mask: jax.Array) -> jax.Array:
    return jnp.sum(rewards, axis=-1, where=mask)


def _same_for_every_token(values: jax.Array, mask: jax.Array) -> Estimates:
    advantages = jnp.where(mask, values[:, None], 0.0)
    return advantages, advantages


def _reward_to_go(rewards: jax.Array, mask: jax.Array, gamma: float) -> jax.Array:
    """r_t + gamma r_{t+1} + ...; tokens outside the mask are passed over."""

    def step(following, column):
        reward, real = column
        following = jnp.where(real, reward + gamma * following, following)
        return following, following

    _, columns = jax.lax.scan(step, jnp.zeros_like(rewards[:, 0]), (rewards.T, mask.T), reverse=True)
    return jnp.where(mask, columns.T, 0.0)
