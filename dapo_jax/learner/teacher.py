"""Host: what a frozen teacher adds to a batch: advantages, or the probabilities that a loss compares (distillation)."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from dapo_jax.data.containers import Batch
from dapo_jax.learner.micro_batches import MicroBatches
from dapo_jax.learner.token_logprobs import TokenStatistics
from dapo_jax.learner.trainable import WithFrozen


@dataclass(frozen=True)
class Teacher:
    """A frozen language model that scores the policy's tokens. Its architecture may be another."""

    statistics: WithFrozen  # (params, micro-batch) -> TokenStatistics, replicated
    params: Any  # in the dtype of matrix products
    micro_batches: MicroBatches


def judged(
    batch: Batch, found: TokenStatistics, *, weight: float, use_task_rewards: bool
) -> tuple[Batch, dict[str, float]]:
    """`batch` with what the teacher says of its tokens, and metrics.

    Without candidates, less the divergence of each token is added to its advantage; it is not normalised within groups.

    Args:
        found: the teacher's, [B, R], and for the batch's candidates [B, R, K].
        weight: of the divergence in the advantage.
        use_task_rewards: False: advantages are the teacher's alone.
    """
    log_ratio = np.where(batch.mask, batch.old_logprobs - found.logprobs, 0.0).astype(np.float32)
    advantages = batch.advantages if use_task_rewards else np.zeros_like(batch.advantages)
    if found.of_candidates is None:
        advantages = advantages - np.float32(weight) * log_ratio
    trained = log_ratio[batch.loss_mask]
    metrics = {"distillation/reverse_kl": float(trained.mean())} if trained.size else {}
    return dataclasses.replace(batch, advantages=advantages, teacher_logprobs=found.of_candidates), metrics
