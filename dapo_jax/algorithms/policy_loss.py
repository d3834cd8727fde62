"""Device: the policy loss of each token. Aggregation is in aggregation.py."""

import jax
import jax.numpy as jnp

from dapo_jax.containers import Mean

MAX_LOG_RATIO = 20.0  # beyond it the ratio is constant, so that exp cannot overflow


def vanilla(
    logprobs: jax.Array,
    old_logprobs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float,
) -> tuple[jax.Array, dict[str, Mean]]:
    """PPO's clipped loss with decoupled clip ranges and dual clip.

    With r = exp(logprobs - old_logprobs) and A the advantage (DAPO, arXiv:2503.14476, equation 8):

        loss = max(-A r, -A clip(r, 1 - clip_ratio_low, 1 + clip_ratio_high))
        loss = min(loss, -A clip_ratio_c) where A < 0     (dual clip, arXiv:1912.09729, equation 5)

    Args:
        logprobs, old_logprobs: [B, R] of the sampled tokens, under the current and the sampling policy.
        advantages: [B, R], not differentiated.
        mask: [B, R] bool, tokens that the metrics count.

    Returns:
        Loss [B, R] of each token, and the metrics `pg_clipfrac` (share of tokens where the clipped term is the
        larger), `pg_clipfrac_lower` (where the dual clip acts) and `ppo_kl` (mean of old_logprobs - logprobs).
    """
    advantages = jax.lax.stop_gradient(advantages)
    log_ratio = jnp.clip(logprobs - old_logprobs, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = jnp.exp(log_ratio)
    plain = -advantages * ratio
    clipped = -advantages * jnp.clip(ratio, 1 - clip_ratio_low, 1 + clip_ratio_high)
    pessimistic = jnp.maximum(plain, clipped)
    bound = -advantages * clip_ratio_c
    loss = jnp.where(advantages < 0, jnp.minimum(pessimistic, bound), pessimistic)
    metrics = {
        "pg_clipfrac": Mean.of(clipped > plain, mask),
        "pg_clipfrac_lower": Mean.of((pessimistic > bound) & (advantages < 0), mask),
        "ppo_kl": Mean.of(-log_ratio, mask),
    }
    return loss, jax.lax.stop_gradient(metrics)
