"""Device: the tokens of a whole mini-batch that a policy loss treats differently.

SELECTIONS names the selection of each loss in policy_loss.py that has one. All of them take the arrays of the loss and

    noise  [B, R], uniform draws in [0, 1)

and return `selected` [B, R] bool. Their other parameters are options of config.actor, passed by name.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def clip_cov_selection(
    logprobs: jax.Array,
    old_logprobs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    noise: jax.Array,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_cov_ratio: float,
    clip_cov_lb: float,
    clip_cov_ub: float,
) -> jax.Array:
    """Tokens [B, R] whose gradient `clip_cov` detaches, drawn from a whole mini-batch.

    max(1, floor(clip_cov_ratio * tokens)) of those whose covariance lies between the bounds, those with the smallest
    noise; tokens that the ratio's clip already stops are not drawn.

    Its ten parameters are the arrays of every selection and the options of clip_cov, passed by name.
    """
    covariance = _covariance(logprobs, advantages, mask)
    ratio = jnp.exp(logprobs - old_logprobs)
    is_clipped = -advantages * jnp.clip(ratio, 1 - clip_ratio_low, 1 + clip_ratio_high) > -advantages * ratio
    candidates = mask & ~is_clipped & (covariance > clip_cov_lb) & (covariance < clip_cov_ub)
    return _smallest(jnp.where(candidates, noise, jnp.inf), _share(mask, clip_cov_ratio)) & candidates


def kl_cov_selection(
    logprobs: jax.Array,
    old_logprobs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    noise: jax.Array,
    *,
    kl_cov_ratio: float,
) -> jax.Array:
    """Tokens [B, R] that `kl_cov` penalises: the max(1, floor(kl_cov_ratio * tokens)) of highest covariance."""
    covariance = _covariance(logprobs, advantages, mask)
    return _smallest(jnp.where(mask, -covariance, jnp.inf), _share(mask, kl_cov_ratio)) & mask


SELECTIONS: dict[str, Callable[..., jax.Array]] = {"clip_cov": clip_cov_selection, "kl_cov": kl_cov_selection}


def _covariance(logprobs: jax.Array, advantages: jax.Array, mask: jax.Array) -> jax.Array:
    """Each token's term of the covariance of advantage and log-probability over the mask (arXiv:2505.22617, eq. 9)."""
    count = jnp.maximum(jnp.sum(mask), 1)

    def centred(values):
        return values - jnp.sum(values, where=mask) / count

    return centred(advantages) * centred(logprobs)


def _share(mask: jax.Array, ratio: float) -> jax.Array:
    """floor(ratio * tokens), at least 1. A millionth more, so that 0.0002 of 5000 stays 1 in float32."""
    return jnp.maximum(jnp.floor(ratio * (1 + 1e-6) * jnp.sum(mask)), 1)


def _smallest(values: jax.Array, count: jax.Array) -> jax.Array:
    """True at the `count` smallest entries; ties go to the first."""
    order = jnp.argsort(values, axis=None, stable=True)
    ranks = jnp.zeros_like(order).at[order].set(jnp.arange(values.size), unique_indices=True)
    return (ranks < count).reshape(values.shape)
