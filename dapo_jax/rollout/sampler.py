"""Host: verified responses to rows of a prompt set."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.sharding import Mesh

from dapo_jax.data.containers import Rollout
from dapo_jax.data.experience import Experience, check_score_names
from dapo_jax.data.prompts import PromptSet
from dapo_jax.data.tokenizer import Tokenizer
from dapo_jax.monitor.timers import Stage
from dapo_jax.rewards.verification import Verification
from dapo_jax.rewards.worker_pool import Verdict
from dapo_jax.rollout.engine import Engine, GivenUp, Request
from dapo_jax.rollout.responses import StopRule
from dapo_jax.rollout.sampling import Sampling
from dapo_jax.rollout.stops import stop_rule


@dataclass(frozen=True)
class Sampler:
    """Samples responses: an engine on a mesh, between prompts and verified responses."""

    tokenizer: Tokenizer
    engine: Engine
    mesh: Mesh
    stop: tuple[str, ...]  # a response ends with the first of these strings
    stage: Stage

    @property
    def stop_rule(self) -> StopRule | None:
        """Ends responses at the stop strings, if there are any."""
        return stop_rule(self.tokenizer, self.stop) if self.stop else None

    @contextmanager
    def open(
        self,
        weights: Any,
        prompts: PromptSet,
        *,
        num_samples: int,
        purpose: int,
        sampling: Sampling,
        num_prompts: int,
        prompt_lengths: np.ndarray | None = None,
        version: int = 0,
    ) -> Iterator["SampleStream"]:
        """Samples responses to prompts as they are asked for; those not waited for in the end are given up.

        Args:
            weights: of the policy, for decoding.
            prompts: of which rows will be asked for.
            num_prompts: that will be sampled, about.
            prompt_lengths: [N] tokens of those; None = of all `prompts`.
            version: training steps that the policy has seen.
        """
        request = Request(
            weights,
            num_samples,
            purpose,
            sampling,
            prompt_lengths=prompts.lengths if prompt_lengths is None else prompt_lengths,
            num_prompts=num_prompts,
            stop=self.stop_rule,
        )
        stream = SampleStream(self.engine, request, prompts, version, self.stage)
        try:
            yield stream
        finally:
            stream.close()

    def sample(
        self,
        weights: Any,
        prompts: PromptSet,
        rows: Sequence[int],
        numbers: Sequence[int],
        *,
        purpose: int,
        sampling: Sampling,
        verification: Verification,
    ) -> Experience:
        """The responses that `verification` expects, all of them together.

        Args:
            rows, numbers: as for `SampleStream.sample`.
        """
        with self.open(
            weights,
            prompts,
            num_samples=verification.num_samples,
            purpose=purpose,
            sampling=sampling,
            num_prompts=len(rows),
            prompt_lengths=prompts.lengths[list(rows)],
        ) as stream:
            return stream.sample(rows, numbers, verification)()

    def state(self) -> dict[str, Any]:
        """What the engine has learnt about lengths and memory, as arrays for a checkpoint."""
        return self.engine.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`."""
        self.engine.restore(state)


class SampleStream:
    """Responses of one policy, sampled in the order in which they are asked for."""

    def __init__(self, engine: Engine, request: Request, prompts: PromptSet, version: int, stage: Stage) -> None:
        self._engine, self._request, self._prompts, self._version = engine, request, prompts, version
        self._stage, self._under_way = stage, list[Verification]()
        self.given_up = GivenUp()  # known once the stream is closed

    def sample(
        self, rows: Sequence[int], numbers: Sequence[int], verification: Verification
    ) -> Callable[[], Experience]:
        """Begins the responses that `verification` expects; the returned function waits for them and their verdicts.

        Args:
            rows: of the prompts, the same as those of `verification`.
            numbers: address of each row's random draws, with the purpose.
        """
        tokens = [self._prompts.tokens[row] for row in rows]
        with self._stage("gen"):
            pending = self._engine.submit(tokens, numbers, self._request, on_finished=verification.begin)
        self._under_way.append(verification)

        def finish() -> Experience:
            with self._stage("gen"):
                rollout = pending.wait()
            with self._stage("reward"):
                verdicts = verification.wait()
            self._under_way.remove(verification)
            return verified_groups(rollout, tokens, rows, numbers, verification.texts, verdicts, self._version)

        return finish

    def close(self) -> None:
        """Gives up what has not been waited for."""
        self.given_up = self._engine.give_up()
        for verification in self._under_way:
            verification.cancel()


def verified_groups(
    rollout: Rollout,
    prompts: list[list[int]],
    rows: Sequence[int],
    numbers: Sequence[int],
    texts: Sequence[str],
    verdicts: Sequence[Verdict],
    versions: np.ndarray | int,
) -> Experience:
    """The responses to Q prompts with the verdicts on them.

    Args:
        prompts: [Q] token ids.
        texts, verdicts: [Q * G], of the rows of `rollout`.
        versions: [Q] or one for all: training steps that the policy had seen.
    """
    num_samples = len(texts) // len(prompts)

    def grouped(array: Any) -> np.ndarray:
        return np.asarray(array).reshape(len(prompts), num_samples, *np.shape(array)[1:])

    errors = Counter(verdict.error for verdict in verdicts if verdict.error is not None)
    return Experience(
        numbers=np.array(numbers, np.int64),
        rows=np.array(rows, np.int64),
        prompts=prompts,
        responses=grouped(rollout.responses),
        mask=grouped(rollout.mask),
        logprobs=grouped(rollout.logprobs),
        finished=grouped(rollout.finished),
        texts=by_group(texts, num_samples),
        scores={name: grouped(values) for name, values in _scores(verdicts).items()},
        versions=np.array(np.broadcast_to(versions, len(prompts)), np.int64),
        failed=grouped([verdict.error is not None for verdict in verdicts]),
        by_policy=None if rollout.by_policy is None else grouped(rollout.by_policy),
        experts=None if rollout.experts is None else by_group(rollout.experts, num_samples),
        prompt_experts=rollout.prompt_experts,
        answers=by_group([verdict.pred for verdict in verdicts], num_samples),
        error=max(errors, key=lambda error: errors[error], default=""),
        work=rollout.work,
    )


def unverified_groups(
    rollout: Rollout,
    prompts: list[list[int]],
    rows: Sequence[int],
    numbers: Sequence[int],
    texts: Sequence[str],
    versions: np.ndarray | int,
) -> Experience:
    """As `verified_groups`, without verdicts."""
    return verified_groups(rollout, prompts, rows, numbers, texts, [Verdict({}, None, None)] * len(texts), versions)


def by_group(values: Sequence[Any], num_samples: int) -> list[list[Any]]:
    """Values [Q * G] of responses as Q lists of G."""
    return [list(values[first : first + num_samples]) for first in range(0, len(values), num_samples)]


def _scores(verdicts: Sequence[Verdict]) -> dict[str, np.ndarray]:
    """The numbers [B] of the verdicts by name, NaN where a verdict has none, and everywhere without a verdict."""
    names = dict.fromkeys(name for verdict in verdicts for name in verdict.numbers)
    if any(verdict.error is not None for verdict in verdicts):
        names |= dict.fromkeys(("score", "acc"))
    check_score_names(names)
    return {name: np.array([verdict.numbers.get(name, np.nan) for verdict in verdicts], np.float64) for name in names}
