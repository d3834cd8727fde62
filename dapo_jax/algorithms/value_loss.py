"""Device: the critic's loss for each token. Aggregation is in aggregation.py."""

import jax
import jax.numpy as jnp

from dapo_jax.data.containers import Mean


def clipped_value_loss(
    values: jax.Array, old_values: jax.Array, returns: jax.Array, mask: jax.Array, *, cliprange_value: float
) -> tuple[jax.Array, dict[str, Mean]]:
    """Half the larger squared error of the value and of the value clipped around the old one (PPO; arXiv:2005.12729).

        loss = max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2

    Args:
        values, old_values, returns: [B, R]; the old values are those before this batch's updates.
        mask: [B, R] bool, tokens that the metrics count.

    Returns:
        Loss [B, R] of each token, and the metrics `vf_clipfrac` (share of tokens where the clipped error is the
        larger) and `vpred_mean`.
    """
    held = jnp.clip(values, old_values - cliprange_value, old_values + cliprange_value)
    plain, clipped = jnp.square(values - returns), jnp.square(held - returns)
    metrics = {"vf_clipfrac": Mean.of(clipped > plain, mask), "vpred_mean": Mean.of(values, mask)}
    return 0.5 * jnp.maximum(plain, clipped), jax.lax.stop_gradient(metrics)
