"""Host: what a frozen teacher adds to a batch: advantages, or the probabilities that a loss compares (distillation)."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from dapo_jax.data.containers import Batch
from dapo_jax.learner.micro_batches import MicroBatches
from dapo_jax.learner.token_logprobs import TokenStatistics
from dapo_jax.learner.trainable import WithFrozen
from dapo_jax.models.identity import Identity

ABSENT = -25.0  # nats, log-probability of a token that the teacher has no embedding for


@dataclass(frozen=True)
class Teacher:
    """A frozen language model that scores the policy's tokens. Its architecture may be another."""

    statistics: WithFrozen  # (params, micro-batch) -> TokenStatistics, replicated
    params: Any  # in the dtype of matrix products
    vocab_size: int  # its embeddings; the policy may have more
    micro_batches: MicroBatches
    identity: Identity


def judged(
    batch: Batch, found: TokenStatistics, vocab_size: int, *, weight: float, use_task_rewards: bool
) -> tuple[Batch, dict[str, float]]:
    """`batch` with what the teacher says of its tokens, and metrics.

    Without candidates, less the divergence of each token is added to its advantage; it is not normalised within groups.

    Args:
        found: the teacher's, [B, R], and for the batch's candidates [B, R, K].
        vocab_size: embeddings of the teacher; the log-probability of a token beyond them is `ABSENT`.
        weight: of the divergence in the advantage.
        use_task_rewards: False: advantages are the teacher's alone.
    """
    logprobs, of_candidates = np.where(batch.responses < vocab_size, found.logprobs, ABSENT), found.of_candidates
    if of_candidates is not None:
        of_candidates = np.where(batch.candidates < vocab_size, of_candidates, np.float32(ABSENT))
    log_ratio = np.where(batch.policy_mask, batch.old_logprobs - logprobs, 0.0).astype(np.float32)
    advantages = batch.advantages if use_task_rewards else np.zeros_like(batch.advantages)
    if of_candidates is None:
        advantages = advantages - np.float32(weight) * log_ratio
    trained = log_ratio[batch.loss_mask]
    metrics = {"distillation/reverse_kl": float(trained.mean())} if trained.size else {}
    return dataclasses.replace(batch, advantages=advantages, teacher_logprobs=of_candidates), metrics
