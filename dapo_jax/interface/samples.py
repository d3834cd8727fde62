"""Host: what a policy has sampled, and its advantages with groups, or as numbers, that the caller gives."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from dapo_jax.algorithms.arguments import needs
from dapo_jax.algorithms.named import named_estimator
from dapo_jax.config.derived import keeps_some
from dapo_jax.config.sections import AlgorithmConfig
from dapo_jax.data.experience import Experience
from dapo_jax.errors import InputError
from dapo_jax.learner.learner import Batching
from dapo_jax.learner.trained_networks import uses_critic
from dapo_jax.parallel.sharding import put_rows

BY_PROMPT = "group-token-mean"  # the mean of a loss in which each prompt counts the same
Prompt = str | Sequence[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Samples:
    """G responses of at most R tokens to each of Q prompts. All arrays are NumPy's."""

    prompts: list[Prompt]  # [Q], as they were given
    experience: Experience = dataclasses.field(repr=False)  # all that the package knows of them
    temperature: float  # of the distribution that the tokens were drawn from

    @property
    def texts(self) -> list[list[str]]:
        """[Q][G] decoded responses."""
        return self.experience.texts

    @property
    def tokens(self) -> np.ndarray:
        """[Q, G, R] int32 token ids, padded on the right."""
        return self.experience.responses

    @property
    def mask(self) -> np.ndarray:
        """[Q, G, R] bool, True on the tokens of a response, its end-of-sequence token included."""
        return self.experience.mask

    @property
    def by_policy(self) -> np.ndarray:
        """[Q, G, R] bool, True on the tokens that the policy wrote: all of `mask` but those of an environment."""
        return self.experience.policy_mask

    @property
    def logprobs(self) -> np.ndarray:
        """[Q, G, R] float32 log-probabilities of the policy's tokens, sampled at `temperature`; 0 elsewhere."""
        return self.experience.logprobs

    @property
    def finished(self) -> np.ndarray:
        """[Q, G] bool, False where the length limit cut a response off."""
        return self.experience.finished

    @property
    def scores(self) -> dict[str, np.ndarray]:
        """[Q, G] each: what an environment has given, `score`, `acc` and its other numbers; {} without one."""
        return self.experience.scores

    def __len__(self) -> int:
        return len(self.prompts)

    def select(self, groups: Any) -> "Samples":
        """The groups at these indices, or where a mask [Q] is True."""
        given = np.asarray(groups)
        chosen = np.flatnonzero(given) if given.dtype == bool else given.astype(int)
        if len(outside := chosen[(chosen < -len(self)) | (chosen >= len(self))]):
            raise InputError(f"there is no group {outside[0]} among {len(self)}: choose from 0 to {len(self) - 1}")
        return Samples([self.prompts[index] for index in chosen], self.experience.select(chosen), self.temperature)


def comparing_groups(batching: Batching, shape: tuple[int, ...], groups: Any) -> Any:
    """The estimator of `batching` with the responses of equal names in `groups` as a group.

    Args:
        shape: (Q, G) of the samples.
        groups: [Q, G].

    Raises:
        InputError: it compares no groups, or something else follows those of prompts.
    """
    names, estimator = np.asarray(groups), batching.algorithm.adv_estimator
    if names.shape != shape:
        raise InputError(f"groups have the shape {names.shape}, but the samples {shape}: name one per response")
    found = [f"actor.loss_agg_mode={BY_PROMPT}"] * (batching.actor.loss_agg_mode == BY_PROMPT)
    found += ["keep_pos_ratio or keep_neg_ratio below 1"] * keeps_some(batching.algorithm)
    if not needs(named_estimator(estimator), "num_groups"):
        found.append(f"adv_estimator={estimator}, which compares none")
    if found:
        raise InputError(f"groups do not go with {' and '.join(found)}: leave groups out, or change that")
    numbers = np.unique(names, return_inverse=True)[1].reshape(-1)

    def estimate(rewards: Any, mask: Any, group_ids: Any, **rest: Any) -> Any:
        count = len(rewards)  # at least as many as there are groups; rows of padding have this id
        ids = np.pad(numbers, (0, count - len(numbers)), constant_values=count).astype(np.int32)
        return batching.estimator(rewards, mask, put_rows(ids, batching.mesh), **{**rest, "num_groups": count})

    return estimate


def given_advantages(algorithm: AlgorithmConfig, mask: np.ndarray, advantages: np.ndarray) -> Any:
    """An estimator whose advantages are these.

    Args:
        mask: [Q, G, R] bool, True on tokens that the policy wrote.
        advantages: [Q, G] of responses or [Q, G, R] of tokens.

    Raises:
        InputError: they have another shape, or something needs more than advantages.
    """
    if advantages.shape not in (mask.shape, mask.shape[:2]):
        raise InputError(f"advantages have the shape {advantages.shape}: it must be {mask.shape[:2]} or {mask.shape}")
    if uses_critic(algorithm) or keeps_some(algorithm):
        raise InputError("advantages do not go with a critic, keep_pos_ratio or keep_neg_ratio: give rewards")
    of_tokens = advantages if advantages.ndim == 3 else advantages[..., None]
    rows = np.where(mask, of_tokens, np.float32(0)).reshape(-1, mask.shape[-1])

    def estimate(rewards: Any, *_: Any, **__: Any) -> Any:
        found = np.pad(rows[:, : rewards.shape[1]], ((0, len(rewards) - len(rows)), (0, 0)))
        return found, found

    return estimate
