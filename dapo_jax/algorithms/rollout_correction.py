"""Device: what makes up for a sampler whose log-probabilities differ from the training forward pass.

With d = old_logprobs - rollout_logprobs of each sampled token (training pass before the update, and sampler):

- importance weights multiply each token's loss: exp(d) ("token") or exp(sum of d over the response) ("sequence"),
  truncated at a threshold (TIS, arXiv:2505.24298; Yao et al., "Your Efficient RL Framework Secretly Brings You
  Off-Policy RL Training", 2025) or set to 0 outside a band "low_high" (IcePop);
- rejection takes tokens or whole responses out of the loss by the size of k1 = -d, k2 = d^2 / 2 or
  k3 = exp(d) - d - 1.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

MAX_LOG_RATIO = 20.0
WEIGHTS = ("token", "sequence")
CRITERIA = (
    *(f"token_k{k}" for k in (1, 2, 3)),
    *(f"seq_sum_k{k}" for k in (1, 2, 3)),
    *(f"seq_mean_k{k}" for k in (1, 2, 3)),
    *(f"seq_max_k{k}" for k in (2, 3)),
)
Metrics = dict[str, jax.Array]


@dataclass(frozen=True)
class Band:
    """What is let through: truncated at `high` only, or kept between `low` and `high`."""

    low: float | None
    high: float


def parse_threshold(text: str) -> Band:
    """"2.0" is the upper bound 2, "0.5_2.0" the band from 0.5 to 2.

    Raises:
        ValueError: not of this form, or not 0 < low < high.
    """
    try:
        numbers = [float(part) for part in text.split("_")]
    except ValueError:
        numbers = []
    if len(numbers) == 1 and numbers[0] > 0:
        return Band(None, numbers[0])
    if len(numbers) == 2 and 0 < numbers[0] < numbers[1]:
        return Band(numbers[0], numbers[1])
    raise ValueError(f"threshold {text!r} must be 'high' or 'low_high' with 0 < low < high, such as 2.0 or 0.5_2.0")


def importance_weights(
    old_logprobs: jax.Array,
    rollout_logprobs: jax.Array,
    mask: jax.Array,
    *,
    rollout_is: str,
    threshold: Band,
    batch_normalize: bool,
) -> tuple[jax.Array, Metrics]:
    """Weights [B, R] for the loss of each token, not differentiated; 0 off the mask.

    Args:
        rollout_is: "token" or "sequence".
        batch_normalize: divide by the mean weight, over tokens or over responses.

    Returns:
        The weights, and metrics of the weights before truncation (`rollout_is_ratio_fraction_*`) and
        after it (`rollout_is_{mean,max,min,std,eff_sample_size}`).
    """
    log_ratio = jnp.where(mask, old_logprobs - rollout_logprobs, 0.0)
    if rollout_is == "sequence":
        log_ratio = jnp.broadcast_to(jnp.sum(log_ratio, axis=-1, keepdims=True), mask.shape)
    raw = jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    if threshold.low is None:
        weights = jnp.minimum(raw, threshold.high)
        low = 1 / threshold.high
    else:
        weights = jnp.where((raw >= threshold.low) & (raw <= threshold.high), raw, 0.0)
        low = threshold.low
    weights = jax.lax.stop_gradient(jnp.where(mask, weights, 0.0))
    metrics = {
        "rollout_is_ratio_fraction_high": _mean(raw > threshold.high, mask),
        "rollout_is_ratio_fraction_low": _mean(raw < low, mask),
    }
    if batch_normalize:
        if rollout_is == "token":
            norm = _mean(weights, mask)
        else:
            real = jnp.any(mask, axis=-1)
            norm = _mean(jnp.max(weights, axis=-1), real)
        metrics["rollout_is_batch_norm_factor"] = norm
        weights = weights / jnp.maximum(norm, 1e-8)
    mean = _mean(weights, mask)
    variance = _mean(jnp.square(weights), mask) - jnp.square(mean)
    metrics |= {
        "rollout_is_mean": mean,
        "rollout_is_max": jnp.max(jnp.where(mask, weights, -jnp.inf)),
        "rollout_is_min": jnp.min(jnp.where(mask, weights, jnp.inf)),
        "rollout_is_std": jnp.sqrt(jnp.maximum(variance, 0.0)),
        "rollout_is_eff_sample_size": jnp.square(mean) / jnp.maximum(_mean(jnp.square(weights), mask), 1e-8),
    }
    return weights, metrics


def rejection_mask(
    old_logprobs: jax.Array, rollout_logprobs: jax.Array, mask: jax.Array, *, criteria: tuple[tuple[str, Band], ...]
) -> tuple[jax.Array, Metrics]:
    """Tokens [B, R] of `mask` that satisfy every criterion.

    A criterion "token_k*" judges each token, "seq_sum_k*", "seq_mean_k*" and "seq_max_k*" the whole response by the
    sum, mean or maximum over its tokens. k2 and k3 may be at most `high`. k1 must lie between log low and log high
    (low = 1 / high if it is not given): the bounds are those of the ratio rollout / old.

    Args:
        criteria: names of CRITERIA with their thresholds; k2 and k3 have no lower one.

    Returns:
        The mask, and `rollout_rs_{criterion}_masked_fraction` of the tokens for each, and for all together.
    """
    difference = jnp.clip(jnp.where(mask, old_logprobs - rollout_logprobs, 0.0), -MAX_LOG_RATIO, MAX_LOG_RATIO)
    kept, metrics = mask, {}
    for name, band in criteria:
        level, kind = name.rsplit("_", 1)
        values = _criterion(difference, kind)
        if level == "seq_max":
            values = jnp.max(jnp.where(mask, values, -jnp.inf), axis=-1, keepdims=True)
        elif level != "token":
            values = jnp.sum(jnp.where(mask, values, 0.0), axis=-1, keepdims=True)
            if level == "seq_mean":
                values = values / jnp.maximum(jnp.sum(mask, axis=-1, keepdims=True), 1)
        if kind == "k1":
            low = band.low if band.low is not None else 1 / band.high
            inside = (values >= math.log(low)) & (values <= math.log(band.high))
        else:
            inside = values <= band.high
        kept &= inside
        metrics[f"rollout_rs_{name}_masked_fraction"] = _mean(~jnp.broadcast_to(inside, mask.shape), mask)
    metrics["rollout_rs_masked_fraction"] = _mean(~kept, mask)
    metrics["rollout_rs_seq_masked_fraction"] = _mean(~jnp.any(kept, axis=-1), jnp.any(mask, axis=-1))
    return kept, metrics


def mismatch_metrics(old_logprobs: jax.Array, rollout_logprobs: jax.Array, mask: jax.Array) -> Metrics:
    """How far the sampler is from the training pass.

    `kl` is the mean of rollout - old over tokens, `k3_kl` its low-variance form, `{training,rollout}_{log_ppl,ppl}` the
    perplexities of the two (means over responses), `log_ppl_diff` training's log_ppl less rollout's (positive where the
    training pass finds a response less likely), `ppl_ratio` its exponential, `chi2_token` and `chi2_seq` the mean of
    ratio^2 - 1 over tokens and over responses.
    """
    difference = jnp.where(mask, old_logprobs - rollout_logprobs, 0.0)
    real = jnp.any(mask, axis=-1)
    lengths = jnp.maximum(jnp.sum(mask, axis=-1), 1)
    training = -jnp.sum(jnp.where(mask, old_logprobs, 0.0), axis=-1) / lengths
    rollout = -jnp.sum(jnp.where(mask, rollout_logprobs, 0.0), axis=-1) / lengths
    excess = training - rollout
    sequence = jnp.clip(jnp.sum(difference, axis=-1), -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return {
        "kl": _mean(-difference, mask),
        "logprob_abs_diff": _mean(jnp.abs(difference), mask),
        "k3_kl": _mean(jnp.exp(difference) - difference - 1, mask),
        "training_log_ppl": _mean(training, real),
        "training_ppl": _mean(jnp.exp(training), real),
        "rollout_log_ppl": _mean(rollout, real),
        "rollout_ppl": _mean(jnp.exp(rollout), real),
        "log_ppl_diff": _mean(excess, real),
        "log_ppl_abs_diff": _mean(jnp.abs(excess), real),
        "log_ppl_diff_max": jnp.max(jnp.where(real, excess, -jnp.inf)),
        "log_ppl_diff_min": jnp.min(jnp.where(real, excess, jnp.inf)),
        "ppl_ratio": _mean(jnp.exp(excess), real),
        "chi2_token": _mean(jnp.exp(2 * difference), mask) - 1,
        "chi2_seq": _mean(jnp.exp(2 * sequence), real) - 1,
    }


def _criterion(difference: jax.Array, kind: str) -> jax.Array:
    if kind == "k1":
        return -difference
    return 0.5 * jnp.square(difference) if kind == "k2" else jnp.exp(difference) - 1 - difference


def _mean(values: jax.Array, mask: jax.Array) -> jax.Array:
    return jnp.sum(values, where=mask, dtype=jnp.float32) / jnp.maximum(jnp.sum(mask), 1)
