"""Device: on-policy distillation: how far a student's next tokens are from those of a teacher, on the student's text.

The divergence is the reverse one, KL(student || teacher), of Agarwal et al., "On-Policy Distillation of Language
Models" (arXiv:2306.13649), and Thinking Machines, "On-Policy Distillation" (2025).
"""

import jax
import jax.numpy as jnp

FLOOR = 1e-6  # of the probability of all other tokens: a float32 sum of the named ones is not more precise


def coarse_reverse_kl(logprobs: jax.Array, teacher_logprobs: jax.Array) -> jax.Array:
    """KL(p || q) of the K named tokens and one bucket for all others, [..., K] -> [...].

    sum over buckets of p (log p - log q). It is at least 0 and at most the divergence over the whole vocabulary, as
    merging tokens never raises a divergence; with all tokens but one named, it is equal. The probabilities sum to 1, so
    the gradient is the sum of (log p - log q) times that of p: the logarithms are not differentiated.

    Args:
        logprobs, teacher_logprobs: [..., K] of the same K tokens, of the student and of the teacher.
    """
    probabilities, of_teacher = _with_rest(logprobs), _with_rest(teacher_logprobs)
    log_ratio = jnp.log(probabilities[1] / of_teacher[1])
    named = jnp.sum(probabilities[0] * jax.lax.stop_gradient(logprobs - teacher_logprobs), axis=-1)
    return named + probabilities[1] * jax.lax.stop_gradient(log_ratio)


def _with_rest(logprobs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Probabilities [..., K] of the named tokens, and [...] of all others."""
    named = jnp.exp(logprobs)
    return named, jnp.maximum(1 - jnp.sum(named, axis=-1), FLOOR)
