"""Device: from a verifier's score to the reward of a response and of its tokens."""

import functools

import jax
import jax.numpy as jnp

from dapo_jax.config.sections import LengthRewardConfig


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


@functools.partial(jax.jit, static_argnames=("max_response_length", "settings"))
def length_rewards(
    lengths: jax.Array, right: jax.Array, *, max_response_length: int, settings: LengthRewardConfig
) -> jax.Array:
    """weight x the length reward [Q, G] float32 of settings.form, group or cosine.

    Args:
        lengths: [Q, G] int32, tokens per response.
        right: [Q, G] bool, whether the answer is right.
        max_response_length: tokens after which a response is cut off.
    """
    if settings.form == "group":
        found = group_length_reward(lengths, right)
    else:
        found = cosine_length_reward(
            lengths,
            right,
            max_response_length,
            right_bounds=(settings.right_short, settings.right_long),
            wrong_bounds=(settings.wrong_short, settings.wrong_long),
            at_limit=settings.at_limit,
        )
    return settings.weight * found


def group_length_reward(lengths: jax.Array, right: jax.Array) -> jax.Array:
    """0.5 for a group's shortest response down to -0.5 for its longest; at most 0 for wrong ones; 0 if all are equal.

    Kimi k1.5 (arXiv:2501.12599, section 2.3.3).

    Args:
        lengths, right: [Q, G].
    """
    shortest, longest = lengths.min(axis=-1, keepdims=True), lengths.max(axis=-1, keepdims=True)
    reward = 0.5 - (lengths - shortest) / jnp.maximum(longest - shortest, 1)
    reward = jnp.where(right, reward, jnp.minimum(reward, 0.0))
    return jnp.where(longest > shortest, reward, 0.0)


def cosine_length_reward(
    lengths: jax.Array,
    right: jax.Array,
    max_response_length: int,
    *,
    right_bounds: tuple[float, float],
    wrong_bounds: tuple[float, float],
    at_limit: float,
) -> jax.Array:
    """Half a cosine over the length, from the first of two bounds at 0 tokens to the second at the maximum.

    Demystifying Long Chain-of-Thought Reasoning (arXiv:2502.03373, section 4.2). A response of the maximum length gets
    `at_limit`, right or wrong.

    Args:
        lengths, right: of any one shape.
    """
    rest = (1 + jnp.cos(jnp.pi * lengths / max_response_length)) / 2  # 1 at 0 tokens, 0 at the maximum
    (right_short, right_long), (wrong_short, wrong_long) = right_bounds, wrong_bounds
    of_right = right_long + (right_short - right_long) * rest
    of_wrong = wrong_long + (wrong_short - wrong_long) * rest
    return jnp.where(lengths >= max_response_length, at_limit, jnp.where(right, of_right, of_wrong))


@jax.jit
def place_rewards(rewards: jax.Array, mask: jax.Array) -> jax.Array:
    """Each response's reward [B] at its last token [B, R]; 0 elsewhere, and for a response without tokens."""
    columns = jnp.arange(mask.shape[1])
    last = jnp.max(jnp.where(mask, columns, -1), axis=-1, keepdims=True)
    return jnp.where(columns == last, rewards[:, None], 0.0)
