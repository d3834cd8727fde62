"""Host: what a frozen teacher adds to a batch: advantages, or the probabilities that a loss compares (distillation)."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from dapo_jax.data.containers import Batch, MicroBatch
from dapo_jax.learner.actor import ActorSettings, logprobs_and_entropy
from dapo_jax.learner.micro_batches import MicroBatches
from dapo_jax.learner.trainable import WithFrozen
from dapo_jax.parallel.sharding import replicated


@dataclass(frozen=True)
class Teacher:
    """A frozen language model that scores the policy's tokens. Its architecture may be another."""

    scores: WithFrozen  # (params, micro-batch) -> log-probabilities [S, U], those of the candidates [S, U, K] or None
    params: Any  # in the dtype of matrix products
    micro_batches: MicroBatches


def build_scores(settings: ActorSettings, mesh: Mesh) -> WithFrozen:
    """`scores` of a `Teacher`; its results are replicated."""

    def scores(params: Any, frozen: None, batch: MicroBatch) -> tuple[jax.Array, jax.Array | None]:
        logprobs, _, of_candidates, _ = logprobs_and_entropy(params, frozen, batch, settings, remat="none")
        return logprobs, of_candidates

    options = dict(settings.compiler_options)
    return WithFrozen(jax.jit(scores, out_shardings=replicated(mesh), compiler_options=options), None)


def judged(
    batch: Batch, logprobs: np.ndarray, of_candidates: np.ndarray | None, *, weight: float, use_task_rewards: bool
) -> tuple[Batch, dict[str, float]]:
    """`batch` with what the teacher says of its tokens, and metrics.

    Without candidates, less the divergence of each token is added to its advantage; it is not normalised within groups.

    Args:
        logprobs: [B, R] of the teacher.
        of_candidates: [B, R, K] of the teacher, for the batch's candidates.
        weight: of the divergence in the advantage.
        use_task_rewards: False: advantages are the teacher's alone.
    """
    log_ratio = np.where(batch.mask, batch.old_logprobs - logprobs, 0.0).astype(np.float32)
    advantages = batch.advantages if use_task_rewards else np.zeros_like(batch.advantages)
    if of_candidates is None:
        advantages = advantages - np.float32(weight) * log_ratio
    trained = log_ratio[batch.loss_mask]
    metrics = {"distillation/reverse_kl": float(trained.mean())} if trained.size else {}
    return dataclasses.replace(batch, advantages=advantages, teacher_logprobs=of_candidates), metrics
