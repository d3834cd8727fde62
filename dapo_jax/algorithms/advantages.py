"""Device: how much better a response is than the others to the same prompt."""

import jax
import jax.numpy as jnp

EPSILON = 1e-6


def grpo(
    scores: jax.Array, mask: jax.Array, group_ids: jax.Array, *, num_groups: int, norm_by_std: bool = True
) -> jax.Array:
    """Group-relative advantages [B, R] (GRPO, arXiv:2402.03300, section 4.1; DAPO, equation 9).

    A group whose scores are all equal gets exactly 0; the only response of a group gets its score.

    Args:
        scores: [B] final reward of each response.
        mask: [B, R] bool, response tokens; the advantage is 0 elsewhere.
        group_ids: [B] int32 in [0, num_groups); the order of the rows does not matter.
        norm_by_std: divide by the sample standard deviation + 1e-6; False is Dr. GRPO (arXiv:2503.20783).
    """

    def over_group(reduce, values):
        return reduce(values, group_ids, num_groups)[group_ids]

    count = over_group(jax.ops.segment_sum, jnp.ones_like(scores))
    single = count == 1
    mean = jnp.where(single, 0.0, over_group(jax.ops.segment_sum, scores) / count)
    centred = scores - mean
    variance = over_group(jax.ops.segment_sum, jnp.square(centred)) / jnp.maximum(count - 1, 1)
    deviation = jnp.where(single, 1.0, jnp.sqrt(variance))
    advantages = centred / (deviation + EPSILON) if norm_by_std else centred
    uniform = over_group(jax.ops.segment_max, scores) == over_group(jax.ops.segment_min, scores)
    advantages = jnp.where(uniform & ~single, 0.0, advantages)
    return jnp.where(mask, advantages[:, None], 0.0)
