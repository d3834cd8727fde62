"""Host: what a frozen teacher adds to a batch: advantages, or the probabilities that a loss compares (distillation)."""

import dataclasses
from typing import Any

import numpy as np

from dapo_jax.data.containers import Batch
from dapo_jax.learner.learner import Learner, Teacher
from dapo_jax.learner.token_logprobs import TokenStatistics
from dapo_jax.learner.update import in_pieces

ABSENT = -25.0  # nats, log-probability of a token that the teacher has no embedding for


def ask_teacher(learner: Learner, teacher: Teacher, batch: Batch, params: Any) -> tuple[Batch, dict[str, float]]:
    """Adds the teacher's judgement of each token (algorithms/distillation.py) to the advantages, or as probabilities of
    the tokens that the policy finds most likely before the update.
    """
    options, mesh, pace = learner.batching.algorithm.distillation, learner.mesh, learner.pace
    with learner.monitor.stage("teacher"):
        if options.form == "top_k":
            pieces = learner.batching.micro_batches["actor"]
            candidates = in_pieces(learner.networks.actor.most_likely, params, batch, pieces, mesh, pace)
            batch = dataclasses.replace(batch, candidates=candidates)
        size = teacher.vocab_size  # tokens beyond it read as its last, on every mesh
        read = dataclasses.replace(batch, responses=np.minimum(batch.responses, size - 1))
        found = in_pieces(teacher.statistics, teacher.params, read, teacher.micro_batches, mesh, pace)
        return judged(batch, found, size, weight=options.weight, use_task_rewards=options.use_task_rewards)


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
