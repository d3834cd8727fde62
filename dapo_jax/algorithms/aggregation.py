"""Device: from the loss of each token to one number, exact however a mini-batch is split.

Every mode is a weighted sum over tokens. The weights need only counts over the whole mini-batch, so that the
sums of micro-batches and of devices add up to the loss of the mini-batch:

    token-mean               sum of all token losses / number of tokens (DAPO, equation 8)
    seq-mean-token-sum       mean over sequences of the sum over tokens
    seq-mean-token-mean      mean over sequences of the mean over tokens (GRPO, arXiv:2402.03300)
    seq-mean-token-sum-norm  seq-mean-token-sum / a constant, the longest response (Dr. GRPO, arXiv:2503.20783)
"""

import jax
import jax.numpy as jnp

MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def token_weights(
    mask: jax.Array,
    mode: str,
    *,
    num_tokens: jax.Array | float,
    num_sequences: jax.Array | float,
    scale_factor: float = 1.0,
) -> jax.Array:
    """Weight [B, R] of each token's loss; the loss of the mini-batch is sum(weights * token_loss).

    Args:
        mask: [B, R] bool, tokens to train on.
        num_tokens: tokens to train on in the whole mini-batch.
        num_sequences: sequences to average over in the whole mini-batch.
        scale_factor: the constant of seq-mean-token-sum-norm, in tokens.

    Raises:
        ValueError: an unknown mode.
    """
    per_sequence = mask / jnp.maximum(num_sequences, 1)
    if mode == "token-mean":
        return mask / jnp.maximum(num_tokens, 1)
    if mode == "seq-mean-token-sum":
        return per_sequence
    if mode == "seq-mean-token-mean":
        return per_sequence / jnp.maximum(jnp.sum(mask, axis=-1, keepdims=True), 1)
    if mode == "seq-mean-token-sum-norm":
        return per_sequence / scale_factor
    raise ValueError(f"loss_agg_mode={mode!r} must be one of {', '.join(MODES)}")


def weighted_sum(token_loss: jax.Array, weights: jax.Array, mask: jax.Array) -> jax.Array:
    """sum(weights * token_loss) over the tokens of `mask`; what stands elsewhere, even NaN, does not count."""
    return jnp.sum(weights * jnp.where(mask, token_loss, 0.0))
