"""Device: corrections for a sampler whose log-probabilities differ from those of the training forward pass.

With d = old_logprobs - rollout_logprobs of each sampled token (training pass before the update, and sampler):

- importance weights multiply each token's loss: exp(d) ("token") or exp(sum of d over the response) ("sequence"),
  truncated at a threshold (TIS, arXiv:2505.24298; Yao et al., "Your Efficient RL Framework Secretly Brings You
  Off-Policy RL Training", 2025) or set to 0 outside a band "low_high" (IcePop);
- rejection leaves tokens or whole responses out of the loss by the size of k1 = -d, k2 = d^2 / 2 or
  k3 = exp(d) - d - 1.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from dapo_jax.errors import InputError

MAX_LOG_RATIO = 20.0
OUTLIER = 0.05  # nats; larger differences between two log-probabilities of a token are counted
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
    """The accepted values: truncated at `high` if `low` is None, else only those between `low` and `high`."""

    low: float | None
    high: float


def parse_threshold(text: str) -> Band:
    """ "2.0" is the upper bound 2, "0.5_2.0" the band from 0.5 to 2.

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
    raise InputError(f"threshold {text!r} must be 'high' or 'low_high' with 0 < low < high, such as 2.0 or 0.5_2.0")


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
        The weights, and metrics `rollout_is_*` of the weights before they are divided by their mean:
        {mean,max,min,std,eff_sample_size} over tokens; seq_{mean,max,min,std,max_deviation} over responses, of the mean
        weight of each and its distance from 1. From the weights before truncation come the shares beyond the threshold:
        ratio_fraction_{high,low} over tokens (over responses with rollout_is=sequence, as are max and min then),
        seq_fraction_{high,low} over responses and, with a band, oob_ratio over tokens.
    """
    log_ratio = jnp.where(mask, old_logprobs - rollout_logprobs, 0.0)
    if rollout_is == "sequence":
        log_ratio = jnp.broadcast_to(jnp.sum(log_ratio, axis=-1, keepdims=True), mask.shape)
    raw = jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    if threshold.low is None:
        weights = jnp.minimum(raw, threshold.high)
    else:
        weights = jnp.where((raw >= threshold.low) & (raw <= threshold.high), raw, 0.0)
    weights = jax.lax.stop_gradient(jnp.where(mask, weights, 0.0))
    metrics = _weight_metrics(raw, weights, mask, threshold, of_responses=rollout_is == "sequence")
    if batch_normalize:
        norm = metrics["rollout_is_mean" if rollout_is == "token" else "rollout_is_seq_mean"]
        norm = jnp.where(norm > 1e-8, norm, 1.0)
        metrics["rollout_is_batch_norm_factor"] = norm
        weights = weights / norm
    return weights, metrics


def _weight_metrics(
    raw: jax.Array, weights: jax.Array, mask: jax.Array, threshold: Band, *, of_responses: bool
) -> Metrics:
    """`of_responses`: all tokens of a response have the same weight."""
    low = 1 / threshold.high if threshold.low is None else threshold.low
    real = jnp.any(mask, axis=-1)
    metrics = _spread("rollout_is", weights, mask)
    mean_square = _mean(jnp.square(weights), mask)
    metrics["rollout_is_eff_sample_size"] = jnp.square(metrics["rollout_is_mean"]) / jnp.maximum(mean_square, 1e-8)
    if of_responses:
        metrics |= {"rollout_is_max": _max(raw[:, 0], real), "rollout_is_min": -_max(-raw[:, 0], real)}
        metrics |= _beyond("rollout_is_ratio", raw[:, 0], real, low, threshold.high)
    else:
        metrics |= _beyond("rollout_is_ratio", raw, mask, low, threshold.high)
    means = _row_means(weights, mask)
    metrics |= _spread("rollout_is_seq", means, real)
    metrics["rollout_is_seq_max_deviation"] = _max(jnp.abs(means - 1), real)
    metrics |= _beyond("rollout_is_seq", _row_means(raw, mask), real, low, threshold.high)
    if threshold.low is not None:
        metrics["rollout_is_oob_ratio"] = _mean((raw < low) | (raw > threshold.high), mask)
    return metrics


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
        The mask, and `rollout_rs_{masked,seq_masked}_fraction`: tokens that are left out, and responses that lose one.
        For each criterion `rollout_rs_{criterion}_*`: the same two; {mean,std} of its values over tokens, std of the
        values clipped to the thresholds; {max,min,fraction_high,fraction_low} over the tokens or responses that it
        judges; seq_{mean,max,min,std,max_deviation,fraction_high,fraction_low} over responses, of their mean value and
        its distance from 0.
    """
    difference = jnp.clip(jnp.where(mask, old_logprobs - rollout_logprobs, 0.0), -MAX_LOG_RATIO, MAX_LOG_RATIO)
    kept, metrics = mask, {}
    for name, band in criteria:
        level, kind = name.rsplit("_", 1)
        values = _criterion(difference, kind)
        if level == "seq_max":
            values = jnp.max(jnp.where(mask, values, -jnp.inf), axis=-1, keepdims=True)
        elif level == "seq_sum":
            values = jnp.sum(jnp.where(mask, values, 0.0), axis=-1, keepdims=True)
        elif level == "seq_mean":
            values = _row_means(values, mask)[:, None]
        low, high = -math.inf, band.high
        if kind == "k1":
            low, high = math.log(1 / band.high if band.low is None else band.low), math.log(band.high)
        inside = (values >= low) & (values <= high)
        kept &= inside
        metrics |= _criterion_metrics(f"rollout_rs_{name}", values, inside, mask, low, high)
    return kept, metrics | _masked_fractions("rollout_rs", kept, mask)


def _criterion_metrics(
    name: str, values: jax.Array, inside: jax.Array, mask: jax.Array, low: float, high: float
) -> Metrics:
    """`values` and `inside` are [B, R] of a criterion that judges tokens, [B, 1] of one that judges responses."""
    real = jnp.any(mask, axis=-1)
    judged = mask if values.shape == mask.shape else real[:, None]
    everywhere = jnp.broadcast_to(values, mask.shape)
    of_responses = _row_means(values, mask) if values.shape == mask.shape else values[:, 0]
    return {
        **_spread(name, values, judged),
        f"{name}_mean": _mean(everywhere, mask),
        f"{name}_std": _deviation(jnp.clip(everywhere, low, high), mask),
        **_beyond(name, values, judged, low, high),
        **_spread(f"{name}_seq", of_responses, real),
        f"{name}_seq_max_deviation": _max(jnp.abs(of_responses), real),
        **_beyond(f"{name}_seq", of_responses, real, low, high),
        **_masked_fractions(name, inside, mask),
    }


def mismatch_metrics(old_logprobs: jax.Array, rollout_logprobs: jax.Array, mask: jax.Array) -> Metrics:
    """How far the sampler is from the training pass.

    `kl` is the mean of rollout - old over tokens, `k3_kl` its low-variance form, `logprob_abs_diff` and `_max` the mean
    and largest |old - rollout|, `logprob_outliers` the share of tokens where that is above OUTLIER, `eff_sample_size`
    mean(ratio)^2 / mean(ratio^2) with ratio exp(old - rollout), `{training,rollout}_{log_ppl,ppl}` the
    perplexities of the two (means over responses), `log_ppl_diff` training's log_ppl less rollout's (positive where the
    training pass finds a response less likely), `ppl_ratio` its exponential, `chi2_token` and `chi2_seq` the mean of
    ratio^2 - 1 over tokens and over responses.
    """
    difference = jnp.where(mask, old_logprobs - rollout_logprobs, 0.0)
    ratio = jnp.exp(difference)
    real = jnp.any(mask, axis=-1)
    lengths = jnp.maximum(jnp.sum(mask, axis=-1), 1)
    training = -jnp.sum(jnp.where(mask, old_logprobs, 0.0), axis=-1) / lengths
    rollout = -jnp.sum(jnp.where(mask, rollout_logprobs, 0.0), axis=-1) / lengths
    excess = training - rollout
    sequence = jnp.clip(jnp.sum(difference, axis=-1), -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return {
        "kl": _mean(-difference, mask),
        "logprob_abs_diff": _mean(jnp.abs(difference), mask),
        "logprob_abs_diff_max": jnp.max(jnp.abs(difference)),
        "logprob_outliers": _mean(jnp.abs(difference) > OUTLIER, mask),
        "eff_sample_size": jnp.square(_mean(ratio, mask)) / jnp.maximum(_mean(jnp.square(ratio), mask), 1e-30),
        "k3_kl": _mean(ratio - difference - 1, mask),
        "training_log_ppl": _mean(training, real),
        "training_ppl": _mean(jnp.exp(training), real),
        "rollout_log_ppl": _mean(rollout, real),
        "rollout_ppl": _mean(jnp.exp(rollout), real),
        "log_ppl_diff": _mean(excess, real),
        "log_ppl_abs_diff": _mean(jnp.abs(excess), real),
        "log_ppl_diff_max": _max(excess, real),
        "log_ppl_diff_min": -_max(-excess, real),
        "ppl_ratio": _mean(jnp.exp(excess), real),
        "chi2_token": _mean(jnp.exp(2 * jnp.clip(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO)), mask) - 1,
        "chi2_seq": _mean(jnp.exp(2 * sequence), real) - 1,
    }


def probability_metrics(old_logprobs: jax.Array, rollout_logprobs: jax.Array, mask: jax.Array) -> Metrics:
    """verl's comparison of the two by probability: |difference| over tokens, and Pearson's correlation coefficient.

    The coefficient is 0 if one of the two does not vary.
    """
    training, rollout = jnp.exp(old_logprobs), jnp.exp(rollout_logprobs)
    difference = jnp.abs(training - rollout)
    covariance = _mean((training - _mean(training, mask)) * (rollout - _mean(rollout, mask)), mask)
    scale = _deviation(training, mask) * _deviation(rollout, mask)
    return {
        "rollout_probs_diff_mean": _mean(difference, mask),
        "rollout_probs_diff_max": _max(difference, mask),
        "rollout_probs_diff_std": _deviation(difference, mask),
        "rollout_actor_probs_pearson_corr": jnp.where(scale > 0, covariance / jnp.where(scale > 0, scale, 1), 0.0),
    }


def _criterion(difference: jax.Array, kind: str) -> jax.Array:
    if kind == "k1":
        return -difference
    return 0.5 * jnp.square(difference) if kind == "k2" else jnp.exp(difference) - 1 - difference


def _spread(name: str, values: jax.Array, mask: jax.Array) -> Metrics:
    return {
        f"{name}_mean": _mean(values, mask),
        f"{name}_max": _max(values, mask),
        f"{name}_min": -_max(-values, mask),
        f"{name}_std": _deviation(values, mask),
    }


def _beyond(name: str, values: jax.Array, mask: jax.Array, low: float, high: float) -> Metrics:
    return {f"{name}_fraction_high": _mean(values > high, mask), f"{name}_fraction_low": _mean(values < low, mask)}


def _masked_fractions(name: str, kept: jax.Array, mask: jax.Array) -> Metrics:
    """The share of tokens that are left out, and of responses that lose at least one."""
    lost = mask & ~kept
    return {
        f"{name}_masked_fraction": _mean(lost, mask),
        f"{name}_seq_masked_fraction": _mean(jnp.any(lost, axis=-1), jnp.any(mask, axis=-1)),
    }


def _row_means(values: jax.Array, mask: jax.Array) -> jax.Array:
    """The mean [B] of each row; 0 for a row without a token."""
    return jnp.sum(values, axis=-1, where=mask) / jnp.maximum(jnp.sum(mask, axis=-1), 1)


def _deviation(values: jax.Array, mask: jax.Array) -> jax.Array:
    """The population's standard deviation."""
    return jnp.sqrt(_mean(jnp.square(values - _mean(values, mask)), mask))


def _max(values: jax.Array, mask: jax.Array) -> jax.Array:
    """0 of nothing, as `_mean` is: a filter may have left no token to judge."""
    return jnp.where(jnp.any(mask), jnp.max(values, where=mask, initial=-jnp.inf), 0.0)


def _mean(values: jax.Array, mask: jax.Array) -> jax.Array:
    return jnp.sum(values, where=mask, dtype=jnp.float32) / jnp.maximum(jnp.sum(mask), 1)
