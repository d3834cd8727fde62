"""Device: from a verifier's score to the reward of a response and of its tokens."""

import functools

import jax
import jax.numpy as jnp


@functools.partial(jax.jit, static_argnames=("max_response_length", "buffer_length", "penalty_factor"))
def shape_rewards(
    scores: jax.Array,
    lengths: jax.Array,
    *,
    max_response_length: int,
    buffer_length: int = 0,
    penalty_factor: float = 1.0,
) -> tuple[jax.Array, jax.Array]:
    """Score + soft overlong penalty, and the penalty alone, [B] float32 each.

    Args:
        scores: [B] float32 from the verifier.
        lengths: [B] int32, tokens per response.
        max_response_length: tokens after which a response is cut off.
        buffer_length: tokens before the cut-off over which the penalty grows; 0 = no penalty.
    """
    if buffer_length:
        penalty = soft_overlong_penalty(lengths, max_response_length, buffer_length, penalty_factor)
    else:
        penalty = jnp.zeros_like(scores)
    return scores + penalty, penalty


def soft_overlong_penalty(
    lengths: jax.Array, max_response_length: int, buffer_length: int, penalty_factor: float
) -> jax.Array:
    """0 up to the buffer, then linear down to -penalty_factor at the maximum length (DAPO, equation 13)."""
    excess = lengths - (max_response_length - buffer_length)
    return jnp.minimum(-excess / buffer_length * penalty_factor, 0.0)


@jax.jit
def place_rewards(rewards: jax.Array, mask: jax.Array) -> jax.Array:
    """Each response's reward [B] at its last token [B, R]; 0 elsewhere, and for a response without tokens."""
    last = jnp.arange(mask.shape[1]) == (jnp.sum(mask, axis=-1) - 1)[:, None]
    return jnp.where(last, rewards[:, None], 0.0)
