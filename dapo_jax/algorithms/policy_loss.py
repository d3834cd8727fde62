"""Device: the policy loss of each token. Aggregation is in aggregation.py.

LOSSES names every loss. All of them take

    logprobs, old_logprobs  [B, R] of the sampled tokens, under the current policy and the ratio's denominator
    advantages              [B, R], not differentiated
    mask                    [B, R] bool, tokens to train on

and return the loss [B, R] of each token and its metrics. Whatever else a loss needs is a parameter of that name:

    an option of config.actor
    selected                [B, R] bool, which token_selection.py computes from the whole mini-batch
    sequences               [B, R] int32, the sequence within its row of each token; without it, a row is one sequence

To add a loss: write the function, and its line in LOSSES.

With r = exp(logprobs - old_logprobs), A the advantage and clip(r) = r within [1 - clip_ratio_low, 1 +
clip_ratio_high]. A sequence here is those of its tokens that `mask` marks.

Differences from verl: config.actor.loss_agg_mode applies to every loss; verl fixes seq-mean-token-mean for gspo and (in
some versions) sapo, and averages geo_mean over each micro-batch. clip_cov and kl_cov compute means, counts and the
selected tokens over the whole mini-batch, as their paper does over the batch; verl does over each micro-batch.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from dapo_jax.algorithms.dppo import dppo_kl, dppo_tv
from dapo_jax.algorithms.kl import magnitude
from dapo_jax.algorithms.ratios import TokenLoss, bounded_log_ratio, sequence_mean
from dapo_jax.data.containers import Mean

MAX_SEQUENCE_LOG_RATIO = 10.0


def vanilla(
    logprobs: jax.Array,
    old_logprobs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.28,
    clip_ratio_c: float = 10.0,
) -> TokenLoss:
    """PPO's clipped loss with decoupled clip ranges (DAPO, arXiv:2503.14476, equation 8) and dual clip.

        loss = max(-A r, -A clip(r))
        loss = min(loss, -A clip_ratio_c) where A < 0     (dual clip, arXiv:1912.09729, equation 5)

    The metrics are `pg_clipfrac` (share of tokens where the clipped term is the larger), `pg_clipfrac_lower` (where
    the dual clip acts) and `ppo_kl` (mean of old_logprobs - logprobs).
    """
    advantages = jax.lax.stop_gradient(advantages)
    log_ratio = bounded_log_ratio(logprobs, old_logprobs)
    ratio = jnp.exp(log_ratio)
    plain = -advantages * ratio
    clipped = -advantages * jnp.clip(ratio, 1 - clip_ratio_low, 1 + clip_ratio_high)
    pessimistic = jnp.maximum(plain, clipped)
    bound = -advantages * clip_ratio_c
    loss = jnp.where(advantages < 0, jnp.minimum(pessimistic, bound), pessimistic)
    metrics = {
        "pg_clipfrac": Mean.of(clipped > plain, mask),
        "pg_clipfrac_lower": Mean.of((pessimistic > bound) & (advantages < 0), mask),
        "ppo_kl": Mean.of(-log_ratio, mask),
    }
    return loss, jax.lax.stop_gradient(metrics)


def gspo(
    logprobs: jax.Array,
    old_logprobs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.28,
    sequences: jax.Array | None = None,
) -> TokenLoss:
    """The clipped loss with the sequence's geometric mean ratio at each token (GSPO, arXiv:2507.18071, equation 14).

    Its value is the same at all tokens, its gradient goes through each token's own log-probability.
    """
    advantages = jax.lax.stop_gradient(advantages)
    log_ratio = logprobs - old_logprobs
    sequence = jax.lax.stop_gradient(sequence_mean(log_ratio, mask, sequences))
    ratio = jnp.exp(jnp.minimum(logprobs - jax.lax.stop_gradient(logprobs) + sequence, MAX_SEQUENCE_LOG_RATIO))
    plain = -advantages * ratio
    clipped = -advantages * jnp.clip(ratio, 1 - clip_ratio_low, 1 + clip_ratio_high)
    metrics = {"pg_clipfrac": Mean.of(clipped > plain, mask), "ppo_kl": Mean.of(-log_ratio, mask)}
    return jnp.maximum(plain, clipped), jax.lax.stop_gradient(metrics)


def gpg(logprobs: jax.Array, old_logprobs: jax.Array, advantages: jax.Array, mask: jax.Array) -> TokenLoss:
    """The plain policy gradient, -A logprobs (GPG, arXiv:2504.02546, equation 7)."""
    metrics = {"ppo_kl": Mean.of(old_logprobs - logprobs, mask)}
    return -jax.lax.stop_gradient(advantages) * logprobs, jax.lax.stop_gradient(metrics)


def cispo(
    logprobs: jax.Array,
    old_logprobs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.28,
) -> TokenLoss:
    """Policy gradient weighted by the clipped ratio, which carries no gradient: -A clip(r) logprobs.

    MiniMax-M1, arXiv:2506.13585, equation 4. No token loses its gradient.
    """
    log_ratio = jax.lax.stop_gradient(bounded_log_ratio(logprobs, old_logprobs))
    ratio = jnp.exp(log_ratio)
    weight = jnp.clip(ratio, 1 - clip_ratio_low, 1 + clip_ratio_high)
    metrics = {"pg_clipfrac": Mean.of(weight != ratio, mask), "ppo_kl": Mean.of(-log_ratio, mask)}
    return -weight * jax.lax.stop_gradient(advantages) * logprobs, metrics


def sapo(
    logprobs: jax.Array,
    old_logprobs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> TokenLoss:
    """A soft gate in place of the clip: -A sigmoid(tau (r - 1)) 4 / tau (SAPO, arXiv:2511.20347, equation 5).

    Args:
        tau_pos, tau_neg: temperature of the gate where A > 0, and elsewhere.
    """
    advantages = jax.lax.stop_gradient(advantages)
    log_ratio = bounded_log_ratio(logprobs, old_logprobs)
    tau = jnp.where(advantages > 0, tau_pos, tau_neg)
    gate = jax.nn.sigmoid(tau * (jnp.exp(log_ratio) - 1)) * 4 / tau
    return -advantages * gate, jax.lax.stop_gradient({"ppo_kl": Mean.of(-log_ratio, mask)})


def geo_mean(
    logprobs: jax.Array,
    old_logprobs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.28,
    importance_weights: jax.Array,
    sequences: jax.Array | None = None,
) -> TokenLoss:
    """The sequence's geometric mean of ratios, each clipped (GMPO, arXiv:2507.20673, equation 3).

        loss = -mean(A) exp(mean of the pessimistic one of log r and log r within [-clip_ratio_low, clip_ratio_high])

    at each token of the sequence, so that seq-mean-token-mean averages over sequences. `pg_clipfrac` and
    `pg_clipfrac_lower` are the shares of tokens out of the band with a positive and with a negative advantage.

    Args:
        importance_weights: [B, R]; a sequence is weighted by their geometric mean.
    """
    log_ratio = bounded_log_ratio(logprobs, old_logprobs)
    sign = jnp.sign(jax.lax.stop_gradient(advantages))
    clipped = jnp.clip(log_ratio, -clip_ratio_low, clip_ratio_high)
    pessimistic = sign * jnp.minimum(sign * log_ratio, sign * clipped)
    ratio = jnp.exp(sequence_mean(pessimistic, mask, sequences))
    advantage = jax.lax.stop_gradient(sequence_mean(advantages, mask, sequences))
    weight = jnp.exp(sequence_mean(jnp.log(jnp.maximum(importance_weights, 1e-20)), mask, sequences))
    loss = -advantage * ratio * weight
    outside = log_ratio != clipped
    metrics = {
        "pg_clipfrac": Mean.of(outside & (advantages > 0), mask),
        "pg_clipfrac_lower": Mean.of(outside & (advantages < 0), mask),
        "ppo_kl": Mean.of(-log_ratio, mask),
    }
    return loss, jax.lax.stop_gradient(metrics)


def clip_cov(
    logprobs: jax.Array,
    old_logprobs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.28,
    selected: jax.Array,
) -> TokenLoss:
    """The clipped loss, but nothing for the tokens selected for their covariance (arXiv:2505.22617, equation 11).

    There is no dual clip. `pg_clipfrac` is the share of selected tokens.

    Args:
        selected: [B, R] bool, from `clip_cov_selection`.
    """
    advantages = jax.lax.stop_gradient(advantages)
    log_ratio = logprobs - old_logprobs
    ratio = jnp.exp(log_ratio)
    plain = -advantages * ratio
    clipped = -advantages * jnp.clip(ratio, 1 - clip_ratio_low, 1 + clip_ratio_high)
    metrics = {"pg_clipfrac": Mean.of(selected, mask), "ppo_kl": Mean.of(-log_ratio, mask)}
    return jnp.where(selected, 0.0, jnp.maximum(plain, clipped)), jax.lax.stop_gradient(metrics)


def kl_cov(
    logprobs: jax.Array,
    old_logprobs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    ppo_kl_coef: float = 0.1,
    selected: jax.Array,
) -> TokenLoss:
    """The unclipped loss -A r; selected tokens pay ppo_kl_coef |logprobs - old_logprobs| (arXiv:2505.22617, eq. 12).

    The penalty's gradient is 0 where the two are equal up to rounding (`kl.magnitude`).

    `ppo_kl_abs` is the mean of |logprobs - old_logprobs| (verl calls it ppo_kl).

    Args:
        selected: [B, R] bool, from `kl_cov_selection`.
    """
    log_ratio = logprobs - old_logprobs
    loss = -jax.lax.stop_gradient(advantages) * jnp.exp(log_ratio)
    metrics = {"ppo_kl_abs": Mean.of(jnp.abs(log_ratio), mask), "ppo_kl": Mean.of(-log_ratio, mask)}
    return jnp.where(selected, loss + ppo_kl_coef * magnitude(log_ratio), loss), jax.lax.stop_gradient(metrics)


def dro(
    logprobs: jax.Array,
    old_logprobs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    dro_beta: float = 0.1,
) -> TokenLoss:
    """The policy gradient with a quadratic pull to the old policy, -A log p + dro_beta / 2 (log r)^2.

    Direct reward optimisation, arXiv:2405.19107, equation 4, with the advantage in place of reward less value. The pull
    also acts on tokens without an advantage.
    """
    log_ratio = logprobs - old_logprobs
    loss = -jax.lax.stop_gradient(advantages) * logprobs + dro_beta / 2 * jnp.square(log_ratio)
    return loss, jax.lax.stop_gradient({"ppo_kl": Mean.of(-log_ratio, mask)})


LOSSES: dict[str, Callable[..., TokenLoss]] = {
    "vanilla": vanilla,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "gspo": gspo,
    "gpg": gpg,
    "cispo": cispo,
    "sapo": sapo,
    "geo_mean": geo_mean,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "dro": dro,
}
