"""Host: verified responses to rows of a prompt set; responses are verified while others are still being decoded."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np

from dapo_jax.data.containers import Rollout
from dapo_jax.data.experience import Experience, check_score_names
from dapo_jax.data.prompts import PromptSet
from dapo_jax.data.rows import PromptRow
from dapo_jax.data.tokenizer import Tokenizer
from dapo_jax.errors import InputError
from dapo_jax.parallel.processes import gather
from dapo_jax.rewards.worker_pool import ScoreRequest, Verdict, VerifierPool
from dapo_jax.rollout.engine import RolloutEngine, StopRule
from dapo_jax.rollout.sampling import Sampling

_WAIT_S = 0.5  # between two looks at whether the run is to stop


class Stage(Protocol):
    """Names the stage of the step that runs inside it, for timers and the console."""

    def __call__(self, name: str, /) -> AbstractContextManager[Any]: ...


@dataclass(frozen=True)
class Sampler:
    """Samples and verifies responses to rows of a prompt set."""

    tokenizer: Tokenizer
    verifiers: VerifierPool
    engine: RolloutEngine
    stop: tuple[str, ...] = ()  # a response ends with the first of these strings

    @property
    def pad_id(self) -> int:
        """The token where nothing was sampled."""
        return self.engine.pad_id

    def start(
        self,
        params: Any,
        prompt_set: PromptSet,
        rows: Sequence[int],
        numbers: Sequence[int],
        *,
        num_samples: int,
        purpose: int,
        sampling: Sampling,
        stage: Stage,
        version: int = 0,
        on_ended: Callable[[int], object] = lambda count: None,
    ) -> Callable[[], Experience]:
        """Samples `num_samples` responses to each row; the result waits for the verdicts that are still open.

        Args:
            numbers: address of each row's random draws, with `purpose`.
            version: training steps that the policy has seen.
            on_ended: is called with the number of responses that have ended, each time that some have.
        """
        verification = _Verification(self, [prompt_set.rows[row] for row in rows], num_samples, on_ended)
        prompts = [prompt_set.tokens[row] for row in rows]
        with stage("gen"):
            rollout = self.engine.generate(
                params,
                prompts,
                numbers,
                num_samples=num_samples,
                purpose=purpose,
                sampling=sampling,
                stop=stop_rule(self.tokenizer, self.stop) if self.stop else None,
                on_finished=verification.begin,
            )
        shape = (len(prompts), num_samples)

        def finish() -> Experience:
            with stage("reward"):
                verdicts = verification.wait()
            names = {name: None for verdict in verdicts for name in verdict.numbers}
            check_score_names(names)
            scores = {
                name: np.array([verdict.numbers.get(name, np.nan) for verdict in verdicts], np.float64)
                for name in names
            }
            errors = Counter(verdict.error for verdict in verdicts if verdict.error is not None)
            texts, answers = verification.texts, [verdict.pred for verdict in verdicts]
            by_policy = rollout.by_policy
            return Experience(
                numbers=np.array(numbers, np.int64),
                rows=np.array(rows, np.int64),
                prompts=prompts,
                responses=np.asarray(rollout.responses).reshape(*shape, -1),
                mask=np.asarray(rollout.mask).reshape(*shape, -1),
                logprobs=np.asarray(rollout.logprobs).reshape(*shape, -1),
                finished=np.asarray(rollout.finished).reshape(shape),
                texts=[texts[i : i + num_samples] for i in range(0, len(texts), num_samples)],
                scores={name: values.reshape(shape) for name, values in scores.items()},
                versions=np.full(len(prompts), version, np.int64),
                failed=np.array([verdict.error is not None for verdict in verdicts]).reshape(shape),
                by_policy=None if by_policy is None else np.asarray(by_policy).reshape(*shape, -1),
                answers=[answers[i : i + num_samples] for i in range(0, len(answers), num_samples)],
                error=max(errors, key=lambda error: errors[error], default=""),
            )

        return finish


def check_stop_strings(tokenizer: Tokenizer, strings: Sequence[str]) -> None:
    """Raises ValueError if a string can never stand in a response, as a special token has no text there."""
    for string in strings:
        if string.strip() not in tokenizer.decode(tokenizer.encode(string)):
            raise InputError(
                f"rollout.stop has {string!r}, which holds a special token of the model: those have no text in a "
                "response, so it would never end there; leave it out (a response ends at the model's end tokens anyway)"
            )


def stop_rule(tokenizer: Tokenizer, strings: Sequence[str]) -> StopRule:
    """Ends a response with the token that completes one of the strings."""

    longest = max(map(len, strings)) + 4  # characters; the first ones may be the broken rest of another

    def kept(tokens: list[int], looked_at: int) -> int | None:
        reach, first = longest, max(looked_at - longest, 0)
        while first and len(tokenizer.decode(tokens[first:looked_at])) < longest:  # tokens may have no text
            reach *= 2
            first = max(looked_at - reach, 0)

        def stops(count: int) -> bool:
            text = tokenizer.decode(tokens[first:count])
            return any(string in text for string in strings)

        if not stops(len(tokens)):
            return None
        return next((count for count in range(looked_at + 1, len(tokens) + 1) if stops(count)), None)

    return kept


class _Verification:
    """The verdicts on the responses of one call, asked for as the responses end; each process asks for its groups'."""

    def __init__(
        self, sampler: Sampler, rows: Sequence[PromptRow], num_samples: int, on_ended: Callable[[int], object]
    ) -> None:
        self._on_ended = on_ended
        self.tokenizer, self.verifiers, self._check = sampler.tokenizer, sampler.verifiers, sampler.engine.check
        self.rows, self.num_samples = rows, num_samples
        self.texts = [""] * (len(rows) * num_samples)
        self._asked: list[tuple[ScoreRequest, Future[Verdict]] | None] = [None] * len(self.texts)

    def begin(self, ended: np.ndarray, rollout: Rollout) -> None:
        """Hands this process' share of these responses to the verifiers."""
        for index in ended.tolist():
            text = self.tokenizer.decode(rollout.responses[index][rollout.mask[index]].tolist())
            self.texts[index] = text
            if self._process_of(index) == jax.process_index():
                row = self.rows[index // self.num_samples]
                request = ScoreRequest(row.data_source, text, row.ground_truth, row.extra_info)
                self._asked[index] = request, self.verifiers.submit(request)
        self._on_ended(len(ended))

    def wait(self) -> list[Verdict]:
        """The verdicts of all processes, in the order of the responses."""
        asked = [pair for pair in self._asked if pair is not None]
        while jax.process_count() == 1 and wait([verdict for _, verdict in asked], timeout=_WAIT_S).not_done:
            self._check()
        own = self.verifiers.collect([request for request, _ in asked], [verdict for _, verdict in asked])
        shared = [iter(part) for part in gather([dataclasses.asdict(verdict) for verdict in own])]
        return [Verdict(**next(shared[self._process_of(index)])) for index in range(len(self.texts))]

    def _process_of(self, index: int) -> int:
        return index // self.num_samples % jax.process_count()
