"""Host: accepted groups as the rows of a batch."""

import dataclasses
from itertools import chain

import numpy as np

from dapo_jax.data.containers import Batch
from dapo_jax.data.experience import Experience
from dapo_jax.data.padding import bucket, pad_prompts
from dapo_jax.learner.router_replay import expert_records


def rows_of(experience: Experience, *, num_groups: int, pad_id: int) -> Batch:
    """The responses as rows with what is known when they were sampled; advantages are 0.

    Args:
        num_groups: at least those of `experience`; rows of padding, with this group id, stand in for the others, so
            that every step has the same shapes.
    """
    given, num_samples = experience.finished.shape
    missing = num_groups - given
    longest = int(experience.mask.sum(axis=-1).max())
    length = min(bucket(longest), experience.mask.shape[-1])
    prompts, prompt_mask = padded_prompts(experience.prompts + [[]] * missing, pad_id)

    def flat(array: np.ndarray) -> np.ndarray:
        return np.pad(array[..., :length], ((0, missing), (0, 0), (0, 0))).reshape(num_groups * num_samples, length)

    group_ids = np.pad(np.arange(given, dtype=np.int32), (0, missing), constant_values=num_groups)
    return Batch(
        prompts=prompts,
        prompt_mask=prompt_mask,
        responses=flat(experience.responses),
        mask=flat(experience.mask),
        loss_mask=flat(experience.policy_mask),
        group_ids=np.repeat(group_ids, num_samples),
        old_logprobs=flat(experience.logprobs),
        advantages=np.zeros((num_groups * num_samples, length), np.float32),
        by_policy=None if experience.by_policy is None else flat(experience.policy_mask),
        experts=expert_records(list(chain.from_iterable(experience.experts or [])), num_groups * num_samples),
        prompt_experts=expert_records(experience.prompt_experts, num_groups),
    )


def without_unknown(batch: Batch, known: np.ndarray) -> Batch:
    """`batch` in which the rows of responses without a verdict are padding: no pass, statistic or count has them.

    Args:
        known: [Q, G] bool, responses with a verdict.
    """
    if known.all():
        return batch
    rows = np.pad(known.reshape(-1), (0, len(batch.mask) - known.size), constant_values=True)
    mask, num_groups = batch.mask & rows[:, None], len(batch.prompts)
    return dataclasses.replace(
        batch,
        mask=mask,
        loss_mask=batch.loss_mask & rows[:, None],
        by_policy=None if batch.by_policy is None else batch.by_policy & rows[:, None],
        group_ids=np.where(rows, batch.group_ids, np.int32(num_groups)),
        old_logprobs=np.where(mask, batch.old_logprobs, np.float32(0)),
    )


def rows_like(batch: Batch, values: np.ndarray) -> np.ndarray:
    """Values [Q, G] of responses by the rows of `batch` [B], 0 in those of padding."""
    return np.pad(values.reshape(-1), (0, len(batch.mask) - values.size))


def known_or_0(experience: Experience, values: np.ndarray) -> np.ndarray:
    """Values [Q, G] of responses, 0 without a verdict: not even a masked NaN goes to a device."""
    return np.where(experience.known, values, np.zeros((), values.dtype))


def padded_prompts(prompts: list[list[int]], pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Prompts as tokens and mask [Q, P]."""
    return pad_prompts(prompts, bucket(max(len(prompt) for prompt in prompts)), pad_id)
