"""Device: which responses of a group are trained on, by their scores."""

import jax
import jax.numpy as jnp

from dapo_jax.algorithms.group_relative import EPSILON
from dapo_jax.algorithms.groups import Groups


def keep_samples(
    advantages: jax.Array,
    scores: jax.Array,
    group_ids: jax.Array,
    trained: jax.Array,
    *,
    num_groups: int,
    keep_pos_ratio: float,
    keep_neg_ratio: float,
    compute_new_adv: bool,
    norm_adv_by_std_in_grpo: bool,
) -> tuple[jax.Array, jax.Array]:
    """Of each group's trained responses, the best with a positive and the worst with a negative advantage.

    ceil(ratio * count) of each sign are kept, ties in row order; an advantage of 0 is always kept.

    Args:
        advantages, scores: [B] one number per response.
        trained: [B] bool, False on responses that nothing else leaves in the loss: none of them is kept.
        compute_new_adv: normalise the advantages of the kept samples again, by the mean and sample standard deviation
            of their scores in the group; 0 if those are all equal. Groups with fewer than two kept samples keep theirs.
        norm_adv_by_std_in_grpo: as for `grpo`.

    Returns:
        advantages [B], 0 where not kept, and kept [B] bool.
    """
    groups = Groups(group_ids, num_groups)
    kept = trained
    for sign, ratio in ((1, keep_pos_ratio), (-1, keep_neg_ratio)):
        chosen = trained & (sign * advantages > 0)
        order = jnp.lexsort((jnp.arange(len(scores)), -sign * scores, ~chosen, group_ids))
        position = jnp.zeros_like(order).at[order].set(jnp.arange(len(scores)), unique_indices=True)
        rank = position - groups.lowest(position)
        # A millionth less, so that 0.3 of 10 stays 3 in float32.
        limit = jnp.ceil(ratio * (1 - 1e-6) * groups.sum(chosen.astype(jnp.float32)))
        kept &= ~chosen | (rank < limit)
    if compute_new_adv:
        count = groups.sum(kept.astype(scores.dtype))
        mean = groups.sum(jnp.where(kept, scores, 0.0)) / jnp.maximum(count, 1)
        centred = scores - mean
        variance = groups.sum(jnp.where(kept, jnp.square(centred), 0.0)) / jnp.maximum(count - 1, 1)
        highest = groups.highest(jnp.where(kept, scores, -jnp.inf))
        equal = highest == groups.lowest(jnp.where(kept, scores, jnp.inf))
        scaled = centred / (jnp.sqrt(variance) + EPSILON) if norm_adv_by_std_in_grpo else centred
        renewed = jnp.where(equal, 0.0, scaled)
        dropped_some = count < groups.count
        advantages = jnp.where(dropped_some & (count >= 2), renewed, advantages)
    return jnp.where(kept, advantages, 0.0), kept
