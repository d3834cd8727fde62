"""Device: DPPO's losses, which bound how far the probability of a token moves, not its ratio (arXiv:2602.04879)."""

import jax
import jax.numpy as jnp

from dapo_jax.algorithms.ratios import TokenLoss, bounded_log_ratio
from dapo_jax.data.containers import Mean


def dppo_tv(
    logprobs: jax.Array,
    old_logprobs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.28,
    clip_ratio_c: float = 10.0,
) -> TokenLoss:
    """DPPO with the total variation of "this token or another", which is |p - p_old|.

        loss = -A sg(min(r, clip_ratio_c)) log p

    but 0 for a token with A > 0 once p - p_old exceeds clip_ratio_high, and for another once p_old - p exceeds
    clip_ratio_low. A rare token may so rise many times over, and a likely one not fall far.

    `pg_clipfrac` is the share of tokens that are left out, `pg_clipfrac_lower` the share whose weight is clip_ratio_c.
    """
    moved = jnp.exp(logprobs) - jnp.exp(old_logprobs)
    return _loss(
        logprobs,
        old_logprobs,
        advantages,
        mask,
        beyond=jnp.where(advantages > 0, moved > clip_ratio_high, moved < -clip_ratio_low),
        clip_ratio_c=clip_ratio_c,
    )


def dppo_kl(
    logprobs: jax.Array,
    old_logprobs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.28,
    clip_ratio_c: float = 10.0,
) -> TokenLoss:
    """`dppo_tv` with the divergence KL(p_old || p) of "this token or another", in nats, in place of |p - p_old|."""
    old, new = jnp.exp(old_logprobs), jnp.exp(logprobs)
    others = (1 - old) * jnp.log((1 - old + 1e-8) / (1 - new + 1e-8))
    divergence = old * (old_logprobs - logprobs) + others
    return _loss(
        logprobs,
        old_logprobs,
        advantages,
        mask,
        beyond=jnp.where(
            advantages > 0,
            (divergence > clip_ratio_high) & (new > old),
            (divergence > clip_ratio_low) & (new < old),
        ),
        clip_ratio_c=clip_ratio_c,
    )


def _loss(
    logprobs: jax.Array,
    old_logprobs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    beyond: jax.Array,
    clip_ratio_c: float,
) -> TokenLoss:
    """The policy gradient weighted by the truncated ratio, without the tokens `beyond` the trust region."""
    advantages = jax.lax.stop_gradient(advantages)
    log_ratio = jax.lax.stop_gradient(bounded_log_ratio(logprobs, old_logprobs))
    ratio, beyond = jnp.exp(log_ratio), jax.lax.stop_gradient(beyond)
    loss = jnp.where(beyond, 0.0, -advantages * jnp.minimum(ratio, clip_ratio_c) * logprobs)
    metrics = {
        "pg_clipfrac": Mean.of(beyond, mask),
        "pg_clipfrac_lower": Mean.of((ratio > clip_ratio_c) & ~beyond, mask),
        "ppo_kl": Mean.of(-log_ratio, mask),
    }
    return loss, metrics
