"""Host: partial rollouts: responses advance by one segment per training step, so that no step waits for the longest.

The policy of each step continues what earlier policies have begun. The token at position p of a response that was begun
in step t is drawn by the policy of step t + p // S, with the noise of its address: no engine, schedule or restart can
change it. Its log-probability is that of the policy that drew it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from dapo_jax.data.containers import Rollout
from dapo_jax.data.experience import Experience, with_records
from dapo_jax.data.prompts import PromptSet
from dapo_jax.rewards.verification import Verification
from dapo_jax.rollout.engine import Begun
from dapo_jax.rollout.sampler import Sampler, unverified_groups, verified_groups
from dapo_jax.rollout.sampling import TRAIN, Sampling

DRAWN = ("responses", "mask", "logprobs", "finished")  # fields of groups and rollouts, in the order of the latter


@dataclass(frozen=True)
class Segments:
    """How far responses advance in a training step."""

    length: int  # S tokens, rollout.segment_length
    max_response_length: int  # R tokens

    def ended(self, groups: Experience) -> np.ndarray:
        """[Q, G] bool, True for responses that nothing continues."""
        return groups.finished | (groups.mask.sum(axis=-1) >= self.max_response_length)

    def token_versions(self, groups: Experience) -> np.ndarray:
        """[Q, G, R] training steps that the policy had seen which drew each token."""
        return np.broadcast_to(
            groups.versions[:, None, None] + np.arange(groups.mask.shape[-1]) // self.length, groups.mask.shape
        )


def begin_groups(
    sampler: Sampler,
    weights: Any,
    prompts: PromptSet,
    rows: Sequence[int],
    numbers: Sequence[int],
    segments: Segments,
    *,
    num_samples: int,
    sampling: Sampling,
    version: int,
) -> Experience:
    """The first segment of `num_samples` responses to each row of `prompts`, without verdicts.

    Args:
        numbers: address of each row's random draws.
        version: training steps that the policy has seen.
    """
    tokens = [prompts.tokens[row] for row in rows]
    with sampler.stage("gen"):
        rollout = sampler.engine.generate(
            weights,
            tokens,
            numbers,
            num_samples=num_samples,
            purpose=TRAIN,
            sampling=sampling,
            stop=sampler.stop_rule,
            limits=np.full(len(rows) * num_samples, segments.length),
        )
    return unverified_groups(rollout, tokens, rows, numbers, [""] * len(rollout.mask), version)


def continue_groups(
    sampler: Sampler, weights: Any, groups: Experience, segments: Segments, *, sampling: Sampling
) -> Experience:
    """`groups` with another segment of each response that has not ended."""
    group, sample = np.nonzero(~segments.ended(groups))
    arrays = {name: getattr(groups, name).copy() for name in DRAWN}
    begun = Rollout(*(array[group, sample] for array in arrays.values()))
    if groups.experts is not None:
        known = [groups.experts[i][j] for i, j in zip(group, sample, strict=True)]
        begun = replace(begun, experts=known)
    lengths = begun.mask.sum(axis=1)
    with sampler.stage("gen"):
        rollout = sampler.engine.generate(
            weights,
            [groups.prompts[i] for i in group],
            groups.numbers[group].tolist(),
            num_samples=1,
            purpose=TRAIN,
            sampling=sampling,
            stop=sampler.stop_rule,
            begun=Begun(sample, begun),
            limits=np.minimum(lengths + segments.length, segments.max_response_length),
        )
    for name, array in arrays.items():
        array[group, sample] = getattr(rollout, name)
    if rollout.experts is not None:
        (groups,) = with_records([groups])
        assert groups.experts is not None
        experts = [list(records) for records in groups.experts]
        for i, j, record in zip(group, sample, rollout.experts, strict=True):
            experts[i][j] = record
        groups = replace(groups, experts=experts)
    return replace(groups, **arrays, work=rollout.work)  # pyright: ignore[reportArgumentType]


def verify_groups(groups: Experience, verification: Verification) -> Experience:
    """`groups`, whose responses have all ended, with the verdicts on them."""
    arrays = [getattr(groups, name) for name in DRAWN]
    rollout = Rollout(
        *(array.reshape(-1, *array.shape[2:]) for array in arrays),
        experts=None if groups.experts is None else list(chain.from_iterable(groups.experts)),
        prompt_experts=groups.prompt_experts,
    )
    verification.begin(np.arange(len(rollout.mask)), rollout)
    return verified_groups(
        rollout,
        groups.prompts,
        groups.rows.tolist(),
        groups.numbers.tolist(),
        verification.texts,
        verification.wait(),
        groups.versions,
    )
