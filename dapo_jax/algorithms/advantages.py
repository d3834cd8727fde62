"""Device: how much better a response, or a token of it, is than expected.

ESTIMATORS names every estimator. All of them take

    rewards    [B, R] float32, reward of each token
    mask       [B, R] bool, response tokens; the result is 0 elsewhere
    group_ids  [B] int32 in [0, num_groups), the prompt of each row; rows with another id are padding

and return (advantages, returns), [B, R] each: returns are what a value function would be fitted to. Whatever else an
estimator needs, arrays (`values`, `reward_baselines`, ...) or options of config.algorithm, is a parameter of that name.
To add one: write the function, and its line in ESTIMATORS. Most that compare within a group are in group_relative.py.

Difference from verl: estimators that compare within a group and neither whiten nor weigh tokens give exactly 0 to a
group of several equal scores. In verl a rounding error of the mean can remain, which grpo divides by a tiny deviation.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from dapo_jax.algorithms.cpo import cpo
from dapo_jax.algorithms.group_relative import (
    Estimates,
    gdpo,
    gpg,
    grpo,
    grpo_passk,
    maxrl,
    opo,
    reinforce_plus_plus_baseline,
    reward_to_go,
    rloo,
    whiten,
)
from dapo_jax.algorithms.groups import Groups


def reinforce_plus_plus(rewards: jax.Array, mask: jax.Array, group_ids: jax.Array, *, gamma: float) -> Estimates:
    """Discounted reward to go, whitened over all tokens of the batch (REINFORCE++, arXiv:2501.03262, equation 6)."""
    returns = reward_to_go(rewards, mask, gamma)
    return jnp.where(mask, whiten(returns, mask), 0.0), returns


def remax(rewards: jax.Array, mask: jax.Array, group_ids: jax.Array, *, reward_baselines: jax.Array) -> Estimates:
    """Reward to go minus the reward of the prompt's greedy response (ReMax, arXiv:2310.10505, equation 5).

    Args:
        reward_baselines: [B] score of the greedy response to the row's prompt.
    """
    returns = reward_to_go(rewards, mask, 1.0)
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


def optimal_token_baseline(
    rewards: jax.Array,
    mask: jax.Array,
    group_ids: jax.Array,
    *,
    num_groups: int,
    logprobs: jax.Array,
    sum_pi_squared: jax.Array,
    importance_weights: jax.Array | None = None,
) -> Estimates:
    """Reward to go minus its mean over the group at the same position, weighted by the squared gradients so far.

    It lowers the variance of the gradient (OTB, arXiv:2602.07078).

        A_t = G_t - sum_i G_it W_it / sum_i W_it,   W_t = sum of w^2 (1 - 2 p + sum of pi^2) over the tokens up to t

    1 - 2 p + sum of pi^2 is the squared length of the gradient of log p by the logits. A token that no other response
    of the group is long enough for keeps its reward to go, as in verl, so equal scores do not cancel there.

    Args:
        logprobs: [B, R] of the tokens, under the policy before the update: log p.
        sum_pi_squared: [B, R] sum over the vocabulary of the squared probabilities in each token's place.
        importance_weights: [B, R] of the rollout correction, w; None: all 1.
    """
    groups, returns = Groups(group_ids, num_groups), reward_to_go(rewards, mask, 1.0)
    squares = 1 - 2 * jnp.exp(logprobs) + sum_pi_squared
    if importance_weights is not None:
        squares *= jnp.square(importance_weights)
    weights = jnp.where(mask, jnp.cumsum(jnp.where(mask, squares, 0.0), axis=-1), 0.0)
    baseline = groups.sum(returns * weights) / (groups.sum(weights) + 1e-8)
    compared = groups.sum(mask.astype(jnp.float32)) > 1
    return jnp.where(mask, returns - jnp.where(compared, baseline, 0.0), 0.0), returns


ESTIMATORS: dict[str, Callable[..., Estimates]] = {
    "grpo": grpo,
    "dapo": grpo,
    "grpo_passk": grpo_passk,
    "rloo": rloo,
    "opo": opo,
    "gpg": gpg,
    "maxrl": maxrl,
    "gdpo": gdpo,
    "optimal_token_baseline": optimal_token_baseline,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
    "gae": gae,
    "cpo": cpo,
}
