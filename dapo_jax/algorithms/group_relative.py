"""Device: estimators that compare the responses of a group, and what all estimators share; advantages.py names them."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from dapo_jax.algorithms.groups import Groups

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
    groups, scores = Groups(group_ids, num_groups), scores_of(rewards, mask)
    return same_for_every_token(normalised(scores, groups, by_deviation=norm_adv_by_std_in_grpo), mask)


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
    groups, scores = Groups(group_ids, num_groups), scores_of(rewards, mask)
    best = scores == groups.highest(scores)
    alone = groups.sum(best.astype(scores.dtype)) == 1
    second = groups.highest(jnp.where(best, -jnp.inf, scores))
    lead = jnp.where(best & alone & ~groups.single, scores - second, 0.0)
    if norm_adv_by_std_in_grpo:
        lead = lead / (groups.deviation(scores) + EPSILON)
    return same_for_every_token(lead, mask)


def rloo(rewards: jax.Array, mask: jax.Array, group_ids: jax.Array, *, num_groups: int) -> Estimates:
    """Score minus the mean score of the other responses to the prompt (RLOO, arXiv:2402.14740, equation 11).

    The only response of a group gets its score.
    """
    groups, scores = Groups(group_ids, num_groups), scores_of(rewards, mask)
    return same_for_every_token(groups.centred(scores) * groups.count / jnp.maximum(groups.count - 1, 1), mask)


def opo(rewards: jax.Array, mask: jax.Array, group_ids: jax.Array, *, num_groups: int) -> Estimates:
    """Score minus the length-weighted mean score of the group (OPO, arXiv:2505.23585, equation 6).

    The only response of a group gets its score.
    """
    groups, scores = Groups(group_ids, num_groups), scores_of(rewards, mask)
    lengths = jnp.sum(mask, axis=-1, dtype=jnp.float32)
    baseline = groups.sum(lengths * scores) / jnp.maximum(groups.sum(lengths), 1)
    centred = scores - jnp.where(groups.single, 0.0, baseline)
    return same_for_every_token(jnp.where(groups.uniform(scores), 0.0, centred), mask)


def gpg(rewards: jax.Array, mask: jax.Array, group_ids: jax.Array, *, num_groups: int) -> Estimates:
    """Centred scores, divided by the share of rows with a score other than 0 (GPG, arXiv:2504.02546, equation 8).

    The only response of a group gets its score.
    """
    groups, scores = Groups(group_ids, num_groups), scores_of(rewards, mask)
    scale = jnp.sum(groups.real) / jnp.maximum(jnp.sum((scores != 0) & groups.real), 1)
    return same_for_every_token(scale * groups.centred(scores), mask)


def maxrl(
    rewards: jax.Array, mask: jax.Array, group_ids: jax.Array, *, num_groups: int, accuracy: jax.Array
) -> Estimates:
    """Score minus the group's mean, divided by its share of right answers (MaxRL, arXiv:2602.02710, theorem 1).

    With scores of 1 and 0 it estimates the gradient of the log-likelihood of a right answer: a prompt weighs 1 / p. A
    group without a right answer gets 0.

    Args:
        accuracy: [B] 1 for a right response, 0 for a wrong one.
    """
    groups, scores = Groups(group_ids, num_groups), scores_of(rewards, mask)
    share = groups.mean(accuracy)
    scaled = jnp.where(share > 0, groups.centred(scores) / jnp.where(share > 0, share, 1.0), 0.0)
    return same_for_every_token(scaled, mask)


def gdpo(
    rewards: jax.Array,
    mask: jax.Array,
    group_ids: jax.Array,
    *,
    num_groups: int,
    norm_adv_by_std_in_grpo: bool = True,
    reward_parts: jax.Array,
    gdpo_reward_weights: Sequence[float],
) -> Estimates:
    """Each of several rewards normalised within its group, then summed and whitened (GDPO, arXiv:2601.05242).

    So a reward with a small spread counts as much as one with a large spread. `rewards` is not read. The sum is
    whitened over all tokens of the batch, as in verl.

    Args:
        reward_parts: [B, K] the K rewards of each response.
        gdpo_reward_weights: of the K normalised rewards in the sum.
    """
    groups = Groups(group_ids, num_groups)
    total = jnp.zeros(mask.shape[0])
    for weight, scores in zip(gdpo_reward_weights, reward_parts.T, strict=True):
        total += weight * normalised(scores, groups, by_deviation=norm_adv_by_std_in_grpo)
    advantages = jnp.where(mask, whiten(jnp.broadcast_to(total[:, None], mask.shape), mask), 0.0)
    return advantages, advantages


def reinforce_plus_plus_baseline(
    rewards: jax.Array, mask: jax.Array, group_ids: jax.Array, *, num_groups: int
) -> Estimates:
    """Score minus the group's mean, whitened over all tokens of the batch (arXiv:2501.03262, section 3.3).

    The only response of a group keeps its score before whitening.
    """
    groups, scores = Groups(group_ids, num_groups), scores_of(rewards, mask)
    centred = groups.centred(scores)
    values = jnp.where(mask, whiten(jnp.broadcast_to(centred[:, None], mask.shape), mask), 0.0)
    return values, values


def normalised(scores: jax.Array, groups: Groups, *, by_deviation: bool) -> jax.Array:
    """Scores [B] less the mean of their group, and divided by its sample standard deviation + 1e-6."""
    centred = groups.centred(scores)
    return centred / (groups.deviation(scores) + EPSILON) if by_deviation else centred


def whiten(values: jax.Array, mask: jax.Array) -> jax.Array:
    """`values` shifted and scaled to mean 0 and sample variance 1 (+ 1e-8) over the tokens of `mask`.

    They are centred twice: values that are nearly equal differ by little more than their mean is rounded by.
    """
    count = jnp.sum(mask)
    for _ in range(2):
        values = values - jnp.sum(values, where=mask) / jnp.maximum(count, 1)
    variance = jnp.sum(jnp.square(values), where=mask) / jnp.maximum(count - 1, 1)
    return values * jax.lax.rsqrt(variance + 1e-8)


def scores_of(rewards: jax.Array, mask: jax.Array) -> jax.Array:
    return jnp.sum(rewards, axis=-1, where=mask)


def same_for_every_token(values: jax.Array, mask: jax.Array) -> Estimates:
    advantages = jnp.where(mask, values[:, None], 0.0)
    return advantages, advantages


def reward_to_go(rewards: jax.Array, mask: jax.Array, gamma: float) -> jax.Array:
    """r_t + gamma r_{t+1} + ...; tokens outside the mask are passed over."""

    def step(following, column):
        reward, real = column
        following = jnp.where(real, reward + gamma * following, following)
        return following, following

    _, columns = jax.lax.scan(step, jnp.zeros_like(rewards[:, 0]), (rewards.T, mask.T), reverse=True)
    return jnp.where(mask, columns.T, 0.0)
