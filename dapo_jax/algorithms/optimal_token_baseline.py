"""Device: a baseline for each token that lowers the variance of the gradient (OTB, arXiv:2602.07078)."""

import jax
import jax.numpy as jnp

from dapo_jax.algorithms.group_relative import Estimates, reward_to_go
from dapo_jax.algorithms.groups import Groups

EPSILON = 1e-8


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
    baseline = groups.sum(returns * weights) / (groups.sum(weights) + EPSILON)
    compared = groups.sum(mask.astype(jnp.float32)) > 1
    return jnp.where(mask, returns - jnp.where(compared, baseline, 0.0), 0.0), returns
