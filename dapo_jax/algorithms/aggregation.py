"""Device: from the loss of each token to one number, exact however a mini-batch is split.

Every mode is a weighted sum over tokens. The weights are computed for the whole mini-batch before it is split, so that
the sums over micro-batches and devices add up to the loss of the mini-batch:

    token-mean               sum of all token losses / number of tokens (DAPO, equation 8)
    seq-mean-token-sum       mean over sequences of the sum over tokens
    seq-mean-token-mean      mean over sequences of the mean over tokens (GRPO, arXiv:2402.03300)
    seq-mean-token-sum-norm  seq-mean-token-sum / a constant, the longest response (Dr. GRPO, arXiv:2503.20783)
    group-token-mean         mean over prompts of the mean over all tokens of a prompt's responses (DAPO, equation 8,
                             read literally: the expectation is over prompts, the fraction inside it)
"""

import jax
import jax.numpy as jnp

from dapo_jax.errors import InputError
from dapo_jax.parallel.ordered_sums import segment_sum

MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "group-token-mean")


def token_weights(
    mask: jax.Array,
    group_ids: jax.Array,
    mode: str,
    *,
    num_sequences: float | None = None,
    scale_factor: float = 1.0,
) -> jax.Array:
    """Weight [B, R] of each token's loss; the loss of the mini-batch is sum(weights * token_loss).

    Args:
        mask: [B, R] bool, tokens to train on in a whole mini-batch.
        group_ids: [B] int32, the prompt of each row, any number.
        num_sequences: what the sequence modes divide by; None: the rows of `mask` that hold a token.
        scale_factor: the constant of seq-mean-token-sum-norm, in tokens.

    Raises:
        ValueError: an unknown mode.
    """
    lengths = jnp.sum(mask, axis=-1, dtype=jnp.float32)
    num_tokens = jnp.sum(lengths)
    per_sequence = mask / jnp.maximum(jnp.sum(lengths > 0) if num_sequences is None else num_sequences, 1)
    if mode == "token-mean":
        return mask / jnp.maximum(num_tokens, 1)
    if mode == "seq-mean-token-sum":
        return per_sequence
    if mode == "seq-mean-token-mean":
        return per_sequence / jnp.maximum(lengths, 1)[:, None]
    if mode == "seq-mean-token-sum-norm":
        return per_sequence / scale_factor
    if mode == "group-token-mean":
        segments = jnp.argmax(group_ids[:, None] == group_ids, axis=1)  # the first row of the group
        group_tokens = segment_sum(lengths, segments, mask.shape[0])
        num_groups = jnp.sum(group_tokens > 0)
        return mask / jnp.maximum(group_tokens, 1)[segments][:, None] / jnp.maximum(num_groups, 1)
    raise InputError(f"loss_agg_mode={mode!r} must be one of {', '.join(MODES)}")


def weighted_sum(token_loss: jax.Array, weights: jax.Array, mask: jax.Array) -> jax.Array:
    """sum(weights * token_loss) over the tokens of `mask`; values elsewhere, even NaN, do not count. All [B, R]."""
    return jnp.sum(weights * jnp.where(mask, token_loss, 0.0))
