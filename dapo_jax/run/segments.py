"""Host: partial rollouts: responses advance by one segment per training step, so that no step waits for the longest.

The policy of each step continues what earlier policies have begun. The token at position p of a response that was begun
in step t is drawn by the policy of step t + p // S, with the noise of its address: no engine, schedule or restart can
change it. Its log-probability is that of the policy that drew it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np

from dapo_jax.config.sections import DataConfig, RolloutConfig
from dapo_jax.data.containers import Rollout
from dapo_jax.data.experience import Experience, concatenate, join, with_records
from dapo_jax.data.work import total_work
from dapo_jax.dynamic_sampling.accumulation import Sampled
from dapo_jax.errors import InputError
from dapo_jax.rollout.responses import Begun
from dapo_jax.run.sampler import GroupRollout, groups_of

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


def segments_of(rollout: RolloutConfig, data: DataConfig) -> Segments | None:
    """None without rollout.segment_length: responses are sampled whole."""
    length = rollout.segment_length
    return Segments(length, data.max_response_length) if length else None


@dataclass
class SegmentedRollout(GroupRollout):
    """Groups whose responses advance by one segment: those begun earlier, then those of the prompts that are started.

    `wait` samples all of them, and returns the groups whose responses have all ended; the others are `left`.
    """

    segments: Segments = field(kw_only=True)
    begun: Experience | None = field(kw_only=True)  # groups of earlier steps, to continue

    def __post_init__(self) -> None:
        if self.request.waits is not None:  # an end of a turn at the end of a segment would be one of the response
            raise InputError(
                f"rollout.segment_length={self.segments.length}: responses that return with tokens of an environment "
                "must be sampled whole: set it to 0"
            )
        self.sampled = Sampled()
        self._numbers: list[int] = []

    @property
    def under_way(self) -> bool:
        return self.begun is not None or bool(self._numbers)

    def start(self, numbers: Sequence[int]) -> None:
        self._numbers += numbers

    def wait(self) -> Experience | None:
        """The groups whose responses have all ended, with the verdicts on them; None if there are none."""
        before = 0 if self.begun is None else self.begun.num_tokens
        parts = [] if self.begun is None else [self.continued(self.begun)]
        if self._numbers:
            parts.append(self.first_segments(self._numbers))
        self.begun, self._numbers = None, []
        groups = concatenate(parts)
        ended = self.segments.ended(groups).all(axis=1)
        left = join([groups.select(np.flatnonzero(~ended))])
        tokens, work = groups.num_tokens - before, total_work(part.work for part in parts)
        self.sampled = Sampled(tokens, work=work, left=left)
        return self.verified(groups.select(np.flatnonzero(ended))) if ended.any() else None

    def close(self) -> None:
        """Nothing is given up: what `wait` has sampled has ended or is `left`."""

    def first_segments(self, numbers: Sequence[int]) -> Experience:
        """The first segment of the responses to these prompts, without verdicts."""
        rows, tokens = self._prompts(numbers)
        num_samples = self.request.num_samples
        with self.sampler.stage("gen"):
            limits = np.full(len(rows) * num_samples, self.segments.length)
            rollout = self.sampler.engine.generate(tokens, numbers, self.request, limits=limits)
        return groups_of(rollout, tokens, rows, numbers, [""] * len(rollout.mask), self.version)

    def continued(self, groups: Experience) -> Experience:
        """`groups` with another segment of each response that has not ended."""
        group, sample = np.nonzero(~self.segments.ended(groups))
        arrays = {name: getattr(groups, name).copy() for name in DRAWN}
        begun = Rollout(*(array[group, sample] for array in arrays.values()))
        if groups.experts is not None:
            known = [groups.experts[i][j] for i, j in zip(group, sample, strict=True)]
            begun = replace(begun, experts=known)
        lengths = begun.mask.sum(axis=1)
        with self.sampler.stage("gen"):
            rollout = self.sampler.engine.generate(
                [groups.prompts[i] for i in group],
                groups.numbers[group].tolist(),
                replace(self.request, num_samples=1),
                begun=Begun(sample, begun),
                limits=np.minimum(lengths + self.segments.length, self.segments.max_response_length),
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

    def verified(self, groups: Experience) -> Experience:
        """`groups`, whose responses have all ended, with the verdicts on them."""
        arrays = [getattr(groups, name) for name in DRAWN]
        rollout = Rollout(
            *(array.reshape(-1, *array.shape[2:]) for array in arrays),
            experts=None if groups.experts is None else list(chain.from_iterable(groups.experts)),
            prompt_experts=groups.prompt_experts,
        )
        numbers, rows = groups.numbers.tolist(), groups.rows.tolist()
        with self.sampler.stage("reward"):
            verification = self.verify(rows)
            verification.begin(np.arange(len(rollout.mask)), rollout)
            verdicts = verification.wait()
        return groups_of(rollout, groups.prompts, rows, numbers, verification.texts, groups.versions, verdicts)
