"""Host: verified responses to the prompts of a run, and the stop strings that end them."""

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from dapo_jax.data.containers import Rollout
from dapo_jax.data.experience import Experience, check_score_names
from dapo_jax.data.prompts import PromptSet
from dapo_jax.data.tokenizer import Tokenizer
from dapo_jax.dynamic_sampling.accumulation import Sampled
from dapo_jax.errors import InputError
from dapo_jax.models import paged_attention_gpu, paged_attention_tpu
from dapo_jax.models.paged_attention import AttendPages, attend_gathered
from dapo_jax.monitor.timers import Stage
from dapo_jax.parallel.devices import AMPERE, cuda_generation, is_before_ampere
from dapo_jax.parallel.mesh import platform
from dapo_jax.rewards.verification import Verification
from dapo_jax.rewards.worker_pool import Verdict
from dapo_jax.rollout.engine import Engine, Pending
from dapo_jax.rollout.layout import EngineSettings
from dapo_jax.rollout.responses import Request, StopRule
from dapo_jax.rollout.sampling import EVALUATE, Sampling
from dapo_jax.rollout.sizes import CHUNK
from dapo_jax.run.episodes import Environments
from dapo_jax.run.turns import Episodes, always, play

logger = logging.getLogger(__name__)

BROKEN = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Sampler:
    """Samples responses: an engine on a mesh, between prompts and verified responses."""

    tokenizer: Tokenizer
    engine: Engine
    mesh: Mesh
    stop: tuple[str, ...]  # a response, or a turn of it, ends with the first of these strings
    stage: Stage
    environments: Environments | None = None  # that answer turns; None = a response is one turn

    def request(self, weights: Any, num_samples: int, purpose: int, sampling: Sampling, **sizes: Any) -> Request:
        """A request whose responses end at the stop strings; `sizes` are further fields of it."""
        sizes["stop"] = stop_rule(self.tokenizer, self.stop) if self.stop else None
        if self.environments is not None:
            sizes |= {"waits": always, "turn_length": self.environments.settings.max_turn_length}
        return Request(weights, num_samples, purpose, sampling, **sizes)

    def prompt_lengths(self, lengths: np.ndarray) -> np.ndarray:
        """Tokens of prompts, at most: an environment may add to them."""
        if self.environments is None or not self.environments.may_speak_first:
            return lengths
        return np.full(len(lengths), self.environments.data.max_prompt_length)

    def sample(
        self,
        request: Request,
        prompts: PromptSet,
        numbers: Sequence[int],
        verify: "Verify",
        row_of: Callable[[int], int] = int,
    ) -> Experience:
        """Verified responses to the prompts with these numbers, all of them together; see `GroupRollout`."""
        lengths = prompts.lengths[[row_of(number) for number in numbers]]
        request = replace(request, prompt_lengths=self.prompt_lengths(lengths), num_prompts=len(numbers))
        with closing(GroupRollout(self, request, prompts, row_of, verify)) as rollout:
            rollout.start(numbers)
            found = rollout.wait()
        assert found is not None
        return found


Verify = Callable[[Sequence[int]], Verification]  # rows of the prompts -> the verdicts on the responses to them


class _Started(NamedTuple):
    """Groups that are being sampled."""

    numbers: Sequence[int]
    rows: list[int]
    tokens: list[list[int]]  # of their prompts
    pending: Pending
    verification: Verification | Episodes


@dataclass
class GroupRollout:
    """Groups of responses of one policy, in the order in which their prompts are started.

    While some are decoded, responses that have ended are verified.
    """

    sampler: Sampler
    request: Request
    prompts: PromptSet
    row_of: Callable[[int], int]  # prompt number, the address of its draws -> row of the prompts
    verify: Verify
    version: int = 0  # training steps that the policy has seen

    def __post_init__(self) -> None:
        self.sampled = Sampled()  # complete once the rollout is closed
        self._started: deque[_Started] = deque()

    @property
    def under_way(self) -> bool:
        """Whether there is something to wait for."""
        return bool(self._started)

    def start(self, numbers: Sequence[int]) -> None:
        """Begins to sample responses to the prompts with these numbers."""
        rows, tokens = self._prompts(numbers)
        verification = self.verify(rows)
        with self.sampler.stage("gen"):
            if self.sampler.environments is not None:
                sources = [self.prompts.rows[row] for row in rows]
                given = self.sampler.environments, numbers, sources, tokens, verification
                verification = Episodes(*given, held_out=self.request.purpose == EVALUATE)
                tokens = verification.prompts
            pending = self.sampler.engine.submit(tokens, numbers, self.request, on_finished=verification.begin)
        self._started.append(_Started(numbers, rows, tokens, pending, verification))

    def wait(self) -> Experience | None:
        """The groups that were started first, with the verdicts on them."""
        numbers, rows, tokens, pending, verification = self._started[0]
        with self.sampler.stage("gen"):
            started = [(one.pending, one.verification) for one in self._started]
            play([(one, episodes) for one, episodes in started if isinstance(episodes, Episodes)])
            rollout = pending.wait()
        with self.sampler.stage("reward"):
            verdicts = verification.wait()
        self._started.popleft()
        groups = groups_of(rollout, tokens, rows, numbers, verification.texts, self.version, verdicts)
        self.sampled.tokens += groups.num_tokens
        return groups

    def close(self) -> None:
        """Gives up what has not been waited for."""
        given_up = self.sampler.engine.give_up()
        for one in self._started:
            one.verification.cancel()
        self.sampled.tokens += given_up.tokens
        self.sampled.aborted, self.sampled.work = given_up.responses, given_up.work

    def _prompts(self, numbers: Sequence[int]) -> tuple[list[int], list[list[int]]]:
        """Rows and token ids of the prompts with these numbers."""
        rows = [self.row_of(number) for number in numbers]
        return rows, [self.prompts.tokens[row] for row in rows]


def groups_of(
    rollout: Rollout,
    prompts: list[list[int]],
    rows: Sequence[int],
    numbers: Sequence[int],
    texts: Sequence[str],
    versions: np.ndarray | int,
    verdicts: Sequence[Verdict] | None = None,
) -> Experience:
    """The responses to Q prompts with the verdicts on them, if there are any yet.

    Args:
        prompts: [Q] token ids.
        texts, verdicts: [Q * G], of the rows of `rollout`.
        versions: [Q] or one for all: training steps that the policy had seen.
    """
    num_samples = len(texts) // len(prompts)
    verdicts = [Verdict({}, None, None)] * len(texts) if verdicts is None else verdicts

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
        scores={name: grouped(values) for name, values in scores_of(verdicts).items()},
        versions=np.array(np.broadcast_to(versions, len(prompts)), np.int64),
        failed=grouped([verdict.error is not None for verdict in verdicts]),
        by_policy=None if rollout.by_policy is None else grouped(rollout.by_policy),
        experts=None if rollout.experts is None else by_group(rollout.experts, num_samples),
        prompt_experts=rollout.prompt_experts,
        answers=by_group([verdict.pred for verdict in verdicts], num_samples),
        error=max(errors, key=lambda error: errors[error], default=""),
        work=rollout.work,
    )


def by_group(values: Sequence[Any], num_samples: int) -> list[list[Any]]:
    """Values [Q * G] of responses as Q lists of G."""
    return [list(values[first : first + num_samples]) for first in range(0, len(values), num_samples)]


def scores_of(verdicts: Sequence[Verdict]) -> dict[str, np.ndarray]:
    """The numbers [B] of the verdicts by name, NaN where a verdict has none, and everywhere without a verdict."""
    names = dict.fromkeys(name for verdict in verdicts for name in verdict.numbers)
    if any(verdict.error is not None for verdict in verdicts):
        names |= dict.fromkeys(("score", "acc"))
    check_score_names(names)
    return {name: np.array([verdict.numbers.get(name, np.nan) for verdict in verdicts], np.float64) for name in names}


def build_engine(settings: EngineSettings, check: Callable[[], None] = lambda: None) -> Engine:
    """The engine for the devices of the mesh; the log says if no kernel attends to pages there."""
    attend, needed = page_attention(settings)
    if needed:
        logger.warning("attention to pages gathers them, which is slow: its kernel needs %s", needed)
    return Engine(settings, attend, check)


def page_attention(settings: EngineSettings) -> tuple[AttendPages | None, str]:
    """Attention to pages for the devices of the mesh, None on CPUs; what a kernel would need, "" if there is one."""
    device, size = platform(settings.mesh), settings.arch.head_dim
    length = max(settings.chunk_length or CHUNK, settings.least_page)
    if device == "cpu":
        return None, ""
    first = settings.mesh.devices.flat[0]
    if is_before_ampere(first):
        return attend_gathered, f"compute capability {AMPERE}.0, not {cuda_generation(first)}"
    if device == "tpu":
        fits, numbers = size % 64 == 0 and length % 16 == 0, "multiples of 64 and 16"
        kernel = paged_attention_tpu.attend
    else:
        fits = all(number >= 16 and number.bit_count() == 1 for number in (size, length))
        numbers, kernel = "powers of two from 16 on", paged_attention_gpu.attend
    needed = f"a head size and a rollout.decode_chunk_length that are {numbers}, not {size} and {length}"
    return (kernel, "") if fits else (attend_gathered, needed)


def check_stop_strings(tokenizer: Tokenizer, strings: Sequence[str]) -> None:
    """Raises ValueError for a string with a special token, which has no text in a response."""
    for string in strings:
        if string.strip() not in tokenizer.decode(tokenizer.encode(string)):
            raise InputError(
                f"rollout.stop has {string!r}, which holds a special token of the model: those have no text in a "
                "response, so none would end there; leave it out (a response ends at the model's end tokens anyway)"
            )


def stop_rule(tokenizer: Tokenizer, strings: Sequence[str]) -> StopRule:
    """Ends a response with the token that completes one of the strings."""
    longest = max(len(string.encode()) for string in strings) + 4  # bytes, of which a token may have just one

    def kept(tokens: list[int], looked_at: int) -> int | None:
        reach, first = longest, max(looked_at - longest, 0)
        while first and len(tokenizer.decode(tokens[first:looked_at])) < longest:  # tokens may have no text
            reach *= 2
            first = max(looked_at - reach, 0)

        def text_until(count: int) -> str:
            return _text(tokenizer, tokens[:count], first)

        def stops(count: int) -> bool:
            text = text_until(count)
            return any(string in text for string in strings)

        if not stops(len(tokens)) and BROKEN not in text_until(len(tokens)):
            return None
        return next((count for count in range(looked_at + 1, len(tokens) + 1) if stops(count)), None)

    return kept


def _text(tokenizer: Tokenizer, tokens: list[int], first: int) -> str:
    """The text from token `first` on, or from up to three tokens earlier, where a character begins.

    A broken character at either end hides more than itself: some tokenizers then replace all bytes next to it.
    """
    starts = range(first, max(first - 4, -1), -1)
    texts = (tokenizer.decode(tokens[start:]) for start in starts)
    return next((text for text in texts if BROKEN not in text), tokenizer.decode(tokens[first:]))
