"""Host: which responses and tokens of a batch the policy learns from, once their advantages are known."""

import dataclasses

import jax
import numpy as np

from dapo_jax.algorithms.kept_samples import keep_samples
from dapo_jax.data.containers import Batch
from dapo_jax.data.experience import Experience
from dapo_jax.learner.learner import Batching
from dapo_jax.learner.rows import known_or_0, rows_like
from dapo_jax.monitor import statistics
from dapo_jax.parallel.sharding import fetch, put, replicated
from dapo_jax.rollout.sampling import SELECT, position_noise

Metrics = dict[str, float]
jitted_keep_samples = jax.jit(
    keep_samples, static_argnames=("num_groups", "compute_new_adv", "norm_adv_by_std_in_grpo")
)


def only_high_entropy(batch: Batch, entropy: np.ndarray, share: float) -> tuple[Batch, Metrics]:
    """Advantages of 0 but for the tokens of highest entropy, `share` of those to train on (arXiv:2506.01939, eq. 5).

    The loss is still divided by the number of all tokens. The paper ranks the tokens of a micro-batch under the policy
    that learns; here they are those of the whole batch, under the policy before the updates.

    Args:
        entropy: [B, R] of the distribution that each token was drawn from.
    """
    threshold = np.quantile(entropy[batch.loss_mask], 1 - share) if batch.loss_mask.any() else 0.0
    advantages = np.where(entropy >= threshold, batch.advantages, 0).astype(np.float32)
    return dataclasses.replace(batch, advantages=advantages), {"actor/entropy_threshold": float(threshold)}


def keep_some(batching: Batching, experience: Experience, batch: Batch) -> tuple[Batch, Metrics]:
    """Advantages and loss mask after algorithm.keep_pos_ratio and keep_neg_ratio, of responses left to train on."""
    algorithm = batching.algorithm
    scores = rows_like(batch, known_or_0(experience, experience.final_rewards)).astype(np.float32)
    first = batch.advantages[:, 0]  # the same at all tokens of a response
    advantages, kept = fetch(
        jitted_keep_samples(
            *put((first, scores, batch.group_ids, batch.loss_mask.any(axis=1)), replicated(batching.mesh)),
            num_groups=batching.num_groups,
            keep_pos_ratio=algorithm.keep_pos_ratio,
            keep_neg_ratio=algorithm.keep_neg_ratio,
            compute_new_adv=algorithm.compute_new_adv,
            norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
        )
    )
    loss_mask = batch.loss_mask & kept[:, None]
    processed = np.where(batch.policy_mask, advantages[:, None], 0.0).astype(np.float32)
    values = processed[loss_mask]
    metrics = statistics.advantage_metrics("advantages_processed", values)
    metrics["critic/advantages_processed/std"] = float(np.std(values)) if values.size else 0.0
    metrics["actor/kept_samples"] = float(np.mean(kept[: experience.finished.size][experience.known.reshape(-1)]))
    return dataclasses.replace(batch, advantages=processed, loss_mask=loss_mask), metrics


def selection_noise(batching: Batching, experience: Experience, batch: Batch) -> np.ndarray:
    """Uniform draws [B, R] for losses that draw tokens, addressed by prompt number, sample and position.

    Every epoch over the batch has the same draws.
    """
    num_samples = experience.finished.shape[1]
    numbers = np.zeros(len(batch.mask) // num_samples, np.int32)
    numbers[: len(experience)] = experience.numbers
    numbers = put(numbers, replicated(batching.mesh))
    return fetch(position_noise(batching.seed, SELECT, numbers, num_samples, batch.mask.shape[1]))
