"""Device: what the policy losses have in common: the ratio of two policies, of a token and of a sequence.

A sequence is those of its tokens that `mask` marks. `sequences` [B, R] int32 numbers the sequences within each row;
without it, a row is one sequence.
"""

import functools

import jax
import jax.numpy as jnp

from dapo_jax.data.containers import Mean
from dapo_jax.parallel.ordered_sums import rows_along, segment_sum

MAX_LOG_RATIO = 20.0  # beyond it the ratio is constant, so that exp cannot overflow
TokenLoss = tuple[jax.Array, dict[str, Mean]]


def bounded_log_ratio(logprobs: jax.Array, old_logprobs: jax.Array) -> jax.Array:
    """logprobs - old_logprobs, within MAX_LOG_RATIO."""
    return jnp.clip(logprobs - old_logprobs, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_mean(values: jax.Array, mask: jax.Array, sequences: jax.Array | None) -> jax.Array:
    """At each token [B, R], the mean over the tokens of its sequence that `mask` marks; 0 if there are none."""
    counts, values = mask.astype(values.dtype), jnp.where(mask, values, 0.0)

    def total(x: jax.Array) -> jax.Array:
        if sequences is None:
            return jnp.broadcast_to(jnp.sum(x, axis=-1, keepdims=True), x.shape)
        sums = jax.vmap(functools.partial(segment_sum, count=x.shape[1] + 1))(x, sequences)
        return rows_along(sums[..., None], sequences)[..., 0]

    return total(values) / jnp.maximum(total(counts), 1)


def off_policy_sequences(
    logprobs: jax.Array,
    sampled_logprobs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    threshold: float,
    sequences: jax.Array | None = None,
) -> jax.Array:
    """Tokens [B, R] bool that off-policy sequence masking leaves out (DeepSeek-V3.2, arXiv:2512.02556, section 3.1).

    Those with A < 0 in a sequence whose mean of sampled_logprobs - logprobs is above `threshold` (nats per token): a
    mistake that the policy would hardly make any more teaches it little. The first are the sampler's, so that its
    distance from the training pass counts as well.
    """
    drift = sequence_mean(jax.lax.stop_gradient(sampled_logprobs - logprobs), mask, sequences)
    return (advantages < 0) & (drift > threshold) & mask
