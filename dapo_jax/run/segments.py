"""Host: partial rollouts: responses advance by one segment per training step, so that no step waits for the longest.

The policy of each step continues what earlier policies have begun. The token at position p of a response that was begun
in step t is drawn by the policy of step t + p // S, with the noise of its address: no engine, schedule or restart can
change it. Its log-probability is that of the policy that drew it.

A turn that ends in a segment is answered in the same step. What the environment says may reach past the segment's end;
the policy then goes on in the step of the next position. Between steps only tokens are kept, and who wrote them: the
next step plays the turns of episodes under way again, in fresh environments with the same seeds.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np

from dapo_jax.config.sections import DataConfig, RolloutConfig
from dapo_jax.data.containers import Rollout
from dapo_jax.data.experience import Experience, concatenate, join, with_records
from dapo_jax.data.rows import PromptRow
from dapo_jax.data.work import total_work
from dapo_jax.dynamic_sampling.accumulation import Sampled
from dapo_jax.errors import InputError
from dapo_jax.rewards.verdicts import Verdict
from dapo_jax.rewards.verification import Verification
from dapo_jax.rollout.responses import Begun, Request
from dapo_jax.run.sampler import GroupRollout, groups_of, scores_of
from dapo_jax.run.turns import Episodes, play

# Fields of groups and rollouts, in the order of the latter
DRAWN = ("responses", "mask", "logprobs", "finished", "by_policy")
TURNS = "num_turns"  # a score that episodes have once they have ended


@dataclass(frozen=True)
class Segments:
    """How far responses advance in a training step."""

    length: int  # S tokens, rollout.segment_length
    max_response_length: int  # R tokens

    def ended(self, groups: Experience) -> np.ndarray:
        """[Q, G] bool, True for responses that nothing continues."""
        full = groups.mask.sum(axis=-1) >= self.max_response_length
        return groups.finished | full | ~np.isnan(groups.score(TURNS))

    def limits(self, groups: Experience, version: int) -> np.ndarray:
        """[Q, G] tokens until which the policy that has seen `version` training steps draws."""
        limits = np.minimum((version + 1 - groups.versions) * self.length, self.max_response_length)
        return np.broadcast_to(limits[:, None], groups.finished.shape)

    def check(self, groups: Experience, step: int) -> None:
        """Raises InputError unless responses under way after training step `step` can be continued."""
        lengths, limits = groups.mask.sum(axis=-1), self.limits(groups, step - 1)
        answered = groups.mask & ~groups.policy_mask
        further = np.take_along_axis(answered, np.maximum(lengths - 1, 0)[..., None], axis=-1)[..., 0]
        fits = (lengths == limits) | further & (lengths > limits) & (limits > 0)
        if not (fits | self.ended(groups)).all():
            raise InputError(
                "the checkpoint holds responses that were begun with another rollout.segment_length than the run's "
                f"{self.length}: restore that value, or start in a new workdir with model.path set to this one"
            )

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
        self.sampled = Sampled()
        self._numbers: list[int] = []
        self._failed: dict[int, Verdict] = {}  # on groups whose environment has failed, by number
        self._asked: dict[int, PromptRow] = {}  # rows with what an environment has said first, by number

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
        failed = np.isin(groups.numbers, list(self._failed))
        groups = replace(groups, finished=groups.finished | failed[:, None])
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
        limits = np.full(len(rows) * self.request.num_samples, self.segments.length)
        prompts, rollout, verdicts = self._drawn(rows, tokens, numbers, self.request, limits)
        return groups_of(rollout, prompts, rows, numbers, [""] * len(rollout.mask), self.version, verdicts)

    def continued(self, groups: Experience) -> Experience:
        """`groups` with another segment of each response that has not ended."""
        limits = self.segments.limits(groups, self.version)
        group, sample = np.nonzero(~self.segments.ended(groups) & (groups.mask.sum(axis=-1) < limits))
        if not group.size:
            return groups
        groups = replace(groups, by_policy=groups.policy_mask)
        arrays = {name: getattr(groups, name).copy() for name in DRAWN}
        begun = Rollout(*(array[group, sample] for array in arrays.values()))
        if groups.experts is not None:
            known = [groups.experts[i][j] for i, j in zip(group, sample, strict=True)]
            begun = replace(begun, experts=known)
        given = groups.rows[group].tolist(), [groups.prompts[i] for i in group], groups.numbers[group].tolist()
        request = replace(self.request, num_samples=1)
        _, rollout, verdicts = self._drawn(*given, request, limits[group, sample], Begun(sample, begun))
        if rollout.by_policy is None:
            rollout = replace(rollout, by_policy=rollout.mask)
        for name, array in arrays.items():
            array[group, sample] = getattr(rollout, name)
        for name, values in scores_of(verdicts or []).items():
            known = groups.score(name).copy()
            known[group, sample] = values
            groups = groups.with_scores(**{name: known})
        if rollout.experts is not None:
            (groups,) = with_records([groups])
            assert groups.experts is not None
            experts = [list(records) for records in groups.experts]
            for i, j, record in zip(group, sample, rollout.experts, strict=True):
                experts[i][j] = record
            groups = replace(groups, experts=experts)
        if self.sampler.environments is None:
            arrays["by_policy"] = None
        return replace(groups, **arrays, work=rollout.work)  # pyright: ignore[reportArgumentType]

    def _drawn(
        self,
        rows: Sequence[int],
        prompts: list[list[int]],
        numbers: Sequence[int],
        request: Request,
        limits: np.ndarray,
        begun: Begun | None = None,
    ) -> tuple[list[list[int]], Rollout, list[Verdict] | None]:
        """A segment of each response; prompts with what an environment says first, and what it gives to episodes."""
        environments = self.sampler.environments
        generate = functools.partial(self.sampler.engine.generate, begun=begun, limits=limits)
        with self.sampler.stage("gen"):
            if environments is None:
                return prompts, generate(prompts, numbers, request), None
            sources = [self.prompts.rows[row] for row in rows]
            later = Verification(None, self.sampler.tokenizer, sources, request.num_samples, check=environments.check)
            given = environments, numbers, sources, prompts, later
            episodes = Episodes(*given, held_out=False, begun=begun and begun.responses, limits=limits)
            self._asked |= dict(zip(numbers, episodes.rows, strict=True))
            try:
                callbacks = {"on_finished": episodes.begin, "play": lambda pending: play([(pending, episodes)])}
                rollout = generate(episodes.prompts, numbers, request, **callbacks)
                verdicts = episodes.wait()
            finally:
                episodes.cancel()
        of_rows = zip(np.repeat(numbers, request.num_samples).tolist(), verdicts, strict=True)
        self._failed |= {number: verdict for number, verdict in of_rows if verdict.error is not None}
        return episodes.prompts, rollout, verdicts

    def verified(self, groups: Experience) -> Experience:
        """`groups`, whose responses have all ended, with the verdicts on them."""
        arrays = [getattr(groups, name) for name in DRAWN]
        rollout = Rollout(
            *(None if array is None else array.reshape(-1, *array.shape[2:]) for array in arrays),
            experts=None if groups.experts is None else list(chain.from_iterable(groups.experts)),
            prompt_experts=groups.prompt_experts,
        )
        numbers, rows = groups.numbers.tolist(), groups.rows.tolist()
        with self.sampler.stage("reward"):
            verification = self.verify(rows)
            verification.rows = [self._asked.get(*one) for one in zip(numbers, verification.rows, strict=True)]
            verification.begin(np.arange(len(rollout.mask)), rollout)
            verdicts = verification.wait()
        if (environments := self.sampler.environments) is not None:
            addresses = np.repeat(numbers, groups.finished.shape[1]).tolist()
            verdicts = [
                self._failed.get(number) or environments.judged(own, verdict)
                for number, own, verdict in zip(addresses, _numbers_of(groups), verdicts, strict=True)
            ]
        return groups_of(rollout, groups.prompts, rows, numbers, verification.texts, groups.versions, verdicts)


def _numbers_of(groups: Experience) -> list[dict[str, float]]:
    """The scores that each response has."""
    scores = {name: values.reshape(-1).tolist() for name, values in groups.scores.items()}
    return [
        {name: values[row] for name, values in scores.items() if not np.isnan(values[row])}
        for row in range(groups.finished.size)
    ]
