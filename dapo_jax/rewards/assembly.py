"""Device: from a verifier's score to the reward of each token."""

import functools

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class Rewards:
    token_level_scores: jax.Array  # [B, R] float32, score + penalty at the last response token, else 0
    overlong_penalty: jax.Array  # [B] float32, 0 or less


@functools.partial(jax.jit, static_argnames=("max_response_length", "buffer_length", "penalty_factor"))
def assemble_rewards(
    scores: jax.Array,
    mask: jax.Array,
    *,
    max_response_length: int,
    buffer_length: int = 0,
    penalty_factor: float = 1.0,
) -> Rewards:
    """Places score + soft overlong penalty at the last token of each response.

    Args:
        scores: [B] float32 from the verifier.
        mask: [B, R] bool, response tokens; lengths are counted here, in tokens.
        max_response_length: tokens after which a response is cut off.
        buffer_length: tokens before that over which the penalty grows; 0 = no penalty.
    """
    lengths = jnp.sum(mask, axis=-1)
    if buffer_length:
        penalty = soft_overlong_penalty(lengths, max_response_length, buffer_length, penalty_factor)
    else:
        penalty = jnp.zeros_like(scores)
    return Rewards(place_rewards(scores + penalty, mask), penalty)


@jax.jit
def place_rewards(rewards: jax.Array, mask: jax.Array) -> jax.Array:
    """Rewards [B] of responses at the last token [B, R] of each; 0 elsewhere, and for a response without tokens."""
    last = jnp.arange(mask.shape[1]) == (jnp.sum(mask, axis=-1) - 1)[:, None]
    return jnp.where(last, rewards[:, None], 0.0)


def soft_overlong_penalty(
    lengths: jax.Array, max_response_length: int, buffer_length: int, penalty_factor: float
) -> jax.Array:
    """0 up to the buffer, then linear down to -penalty_factor at the longest length (DAPO, equation 13)."""
    excess = lengths - (max_response_length - buffer_length)
    return jnp.minimum(-excess / buffer_length * penalty_factor, 0.0)
