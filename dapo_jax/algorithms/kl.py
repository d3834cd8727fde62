"""Device: estimates of the KL divergence to a reference policy, from the log-probabilities of sampled tokens.

With x the log-probability under the policy that sampled and y that under the reference (Schulman, "Approximating KL
Divergence", 2020):

    k1, kl          x - y                    unbiased
    k2, mse         (x - y)^2 / 2
    k3, low_var_kl  exp(y - x) - (y - x) - 1  unbiased, never negative; clamped to [-10, 10]
    abs             |x - y|, `magnitude`

A trailing "+" keeps the value and takes the gradient of k2, which is that of the KL divergence itself; the gradients
of k1 and k3 are not (arXiv:2506.09477).
"""

import jax
import jax.numpy as jnp

from dapo_jax.errors import InputError

MAX_DIFFERENCE = 20.0
MAX_K3 = 10.0
ROUNDING = 1e-5  # nats: two passes over one policy differ by less in float32
ROUNDING_BF16 = 1e-2  # and in bfloat16, in the mean over a response's tokens
ESTIMATORS = ("k1", "kl", "k2", "mse", "k3", "low_var_kl", "abs")
PENALTIES = (*ESTIMATORS, *(f"{name}+" for name in ESTIMATORS))


def kl_penalty(logprobs: jax.Array, ref_logprobs: jax.Array, estimator: str) -> jax.Array:
    """The estimate for each token, of the shape of `logprobs`.

    Raises:
        ValueError: an unknown estimator.
    """
    if estimator.endswith("+"):
        value = _estimate(logprobs, ref_logprobs, estimator[:-1])
        surrogate = _estimate(logprobs, ref_logprobs, "k2")
        return surrogate + jax.lax.stop_gradient(value - surrogate)
    return _estimate(logprobs, ref_logprobs, estimator)


def _estimate(logprobs: jax.Array, ref_logprobs: jax.Array, estimator: str) -> jax.Array:
    difference = logprobs - ref_logprobs
    if estimator in ("k1", "kl"):
        return difference
    if estimator in ("k2", "mse"):
        return 0.5 * jnp.square(difference)
    if estimator in ("k3", "low_var_kl"):
        negative = jnp.clip(-difference, -MAX_DIFFERENCE, MAX_DIFFERENCE)
        return jnp.clip(jnp.exp(negative) - negative - 1, -MAX_K3, MAX_K3)
    if estimator == "abs":
        return magnitude(difference)
    raise InputError(f"KL estimator {estimator!r} must be one of {', '.join(PENALTIES)}")


def magnitude(difference: jax.Array) -> jax.Array:
    """|difference| of two log-probabilities, without a gradient up to `ROUNDING`.

    Below that, the sign is rounding noise, and so the gradient, 1 or -1 however small the difference, would depend on
    how the batch is sharded. In verl, too, two passes over one policy that agree to the bit have no gradient.
    """
    value = jnp.abs(difference)
    return jnp.where(value > ROUNDING, value, jax.lax.stop_gradient(value))


def adapted_coefficient(
    coefficient: float, kl: float, *, target_kl: float, horizon: float, num_sequences: int
) -> float:
    """The coefficient after a batch with mean KL `kl` (arXiv:1909.08593, section 2.2).

    It grows by (kl / target - 1), at most 0.2 either way, times num_sequences / horizon.

    Args:
        kl: mean over sequences of the mean over their tokens.
        horizon: sequences over which the coefficient may change by a factor of about 1.2.
    """
    error = min(max(kl / target_kl - 1, -0.2), 0.2)
    return coefficient * (1 + error * num_sequences / horizon)
