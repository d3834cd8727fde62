"""Host: episodes of several turns while responses are sampled: what the environment says joins the response.

A response that the policy has ended waits for the environment and gives up its slot, while a chunk of the others is
decoded. Tokens, rewards and the schedule depend on the policy, the prompts and what the environment says, not on how
long that takes.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain

import jax
import numpy as np

from dapo_jax.command.tasks import given_function
from dapo_jax.config.sections import Config
from dapo_jax.config.values import with_values
from dapo_jax.data.containers import Rollout
from dapo_jax.data.rows import PromptRow
from dapo_jax.data.tokenizer import Tokenizer
from dapo_jax.environments.chat import Chat
from dapo_jax.environments.episodes import Earned, columns_of, seed_of
from dapo_jax.environments.pool import EnvironmentPool, Play
from dapo_jax.environments.protocol import Fault, Reply
from dapo_jax.environments.tool_formats import format_of
from dapo_jax.errors import InputError
from dapo_jax.rewards.verdicts import ENVIRONMENT_ERROR, Verdict, no_verdict
from dapo_jax.rewards.verification import Verification
from dapo_jax.rewards.weighted import described
from dapo_jax.rollout.engine import Pending

logger = logging.getLogger(__name__)

WAIT_S = 0.5  # between two checks for a stop request
ENDS = ("done", "max_turns", "length", "fault")


@dataclass
class Environments:
    """The environments of a run.

    Args:
        chats: of each environment, by its name.
        seed: of the run.
        check: called while waiting for environments; may raise.
    """

    pool: EnvironmentPool
    chats: Mapping[str, Chat]
    seed: int
    max_prompt_length: int
    check: Callable[[], None] = lambda: None
    # By name, once tried; False: its `reset` has said nothing in the trial, and must not for any row.
    speaks_first: dict[str, bool] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)  # since `take_metrics`

    @property
    def gives_rewards(self) -> bool:
        """Whether the environments give rewards; if not, reward functions read the whole chat."""
        return all(one.rewards for one in self.pool.descriptions.values())

    @property
    def may_speak_first(self) -> bool:
        """Whether an environment may add to prompts."""
        return any(self.speaks_first.get(name, True) for name in self.chats)

    def take_metrics(self) -> dict[str, float]:
        """`environment/` metrics since the last call."""
        calls, (counts, self.counts) = self.pool.take_counts(), (self.counts, Counter())
        ended = max(sum(counts[name] for name in ENDS), 1)
        return {
            **{f"environment/{name}": calls[name] for name in ("calls", "timeouts", "retries", "faults")},
            "environment/time_s/mean": calls["seconds"] / max(calls["calls"], 1),
            "environment/time_s/max": calls["longest"],
            "environment/invalid_calls": float(counts["invalid"]),
            "environment/cut_observations": float(counts["cut"]),
            **{f"environment/ended_by_{name}": counts[name] / ended for name in ENDS},
        }

    def without_reward_function(self, config: Config) -> Config:
        """The config of a run, without a reward function if the environment gives rewards.

        Raises:
            InputError: both give rewards.
        """
        if not self.gives_rewards:
            return config
        if given_function(config.reward) not in ("auto", "none"):
            raise InputError(
                f"{described(given_function(config.reward))} must not be given with environment.path="
                f"{config.environment.path}, which gives rewards itself: leave out the function, or get_reward"
            )
        return with_values(config, {"reward.function": "none"})


@contextmanager
def open_environments(
    config: Config, tokenizer: Tokenizer, check: Callable[[], None] = lambda: None
) -> Iterator[Environments | None]:
    """The environment of a config, or its tools alone; None if it has neither. Its processes end with it.

    Args:
        check: called while waiting for environments; may raise.

    Raises:
        InputError: the environment or the chat template does not fit.
    """
    settings = config.environment
    if not (settings.path or settings.tools):
        yield None
        return
    if jax.process_count() > 1:
        raise InputError(
            f"environment.path and tools cannot be combined with {jax.process_count()} processes yet: use one"
        )
    auto = settings.tool_format == "auto"
    tool_format = format_of(tokenizer.chat_template) if auto else settings.tool_format
    with EnvironmentPool(settings, tool_format, env=config.reward.env) as pool:
        giving = [name for name, one in pool.descriptions.items() if one.rewards]
        if len(giving) not in (0, len(pool.descriptions)):
            raise InputError(
                f"environment.path={settings.path}: only {', '.join(giving)} give rewards: add get_reward to the others"
            )
        chats = {name: Chat(tokenizer, config.data, settings, one.tools) for name, one in pool.descriptions.items()}
        for chat in chats.values():
            chat.check()
        yield Environments(pool, chats, config.seed, config.data.max_prompt_length, check)


class Episodes:
    """The episodes of Q groups, in the place of their verification.

    Args:
        tokens: of each row's prompt, to which the environment may add.
        verification: by reward functions, which have the whole chats; what the environment gives has precedence.

    Raises:
        InputError: a prompt with the first observation is longer than data.max_prompt_length.
    """

    def __init__(
        self,
        environments: Environments,
        numbers: Sequence[int],
        rows: Sequence[PromptRow],
        tokens: Sequence[list[int]],
        verification: Verification,
    ) -> None:
        self._of, self._verification, self.num_samples = environments, verification, verification.num_samples
        begun = [
            environments.pool.begin(seed_of(environments.seed, number), columns_of(row), row.task)
            for number, row in zip(numbers, rows, strict=True)
            for _ in range(self.num_samples)
        ]
        self._plays: list[Play] = [play for play, _ in begun]
        self._chats = [environments.chats[play.name] for play in self._plays]
        self._earned = [Earned(chat.settings.reward == "sum") for chat in self._chats]
        self._faults: dict[int, str] = {}  # by group
        self._ended_by: dict[int, str] = {}  # by row
        self._asked: dict[int, Future[Reply]] = {}  # by row that waits
        self._last: dict[int, list[Future[Reply]]] = {}  # replies to episodes that have ended
        self._turn_starts = [0] * len(begun)
        self._given = [0] * len(begun)  # tokens of the environment
        first = self._first([reply for _, reply in begun])
        chats = self._chats[:: self.num_samples]
        self.prompts = [self._prompt(*one) for one in zip(chats, rows, tokens, first, strict=True)]

    @property
    def texts(self) -> list[str]:
        """Whole chats."""
        return self._verification.texts

    def advance(self, pending: Pending) -> None:
        """Hands the engine what the environment says to the turns of the last call, and the environment new turns.

        It waits for all of these answers, so that the schedule does not depend on how long they take.
        """
        for row in sorted(self._asked):
            self._answer(pending, row, self._asked.pop(row))
        for row in pending.parked.tolist():
            if self._group(row) in self._faults:
                self._end(pending, row, "fault")
            else:
                turn = pending.tokens(row)[self._turn_starts[row] :]
                self._asked[row] = self._of.pool.step(self._plays[row], self._chats[row].text_of(turn))

    def begin(self, ended: np.ndarray, rollout: Rollout) -> None:
        """As `Verification.begin`. A last turn that has filled the length of its episode is answered as well."""
        self._verification.begin(ended, rollout)
        pool = self._of.pool
        for row in ended.tolist():
            if row not in self._ended_by:
                self._ended_by[row] = "length"
                turn = rollout.responses[row][rollout.mask[row]].tolist()[self._turn_starts[row] :]
                self._last[row] = [pool.step(self._plays[row], self._chats[row].text_of(turn))]
            description = pool.descriptions[self._plays[row].name]
            if description.tools and description.rewards and self._ended_by[row] != "fault":
                self._last.setdefault(row, []).append(pool.finish(self._plays[row]))

    def wait(self) -> list[Verdict]:
        """The verdicts, in the order of the responses. A group in which the environment has failed has none."""
        verdicts = self._verification.wait()
        for row, replies in self._last.items():
            for reply in replies:
                with self._faulty(row):
                    self._take(row, self._result(reply))
        self._of.counts.update(self._ended_by.values())
        self._close()
        return [self._verdict(row, verdict) for row, verdict in enumerate(verdicts)]

    def cancel(self) -> None:
        """As `Verification.cancel`."""
        self._verification.cancel()
        for answer in [*self._asked.values(), *chain.from_iterable(self._last.values())]:
            answer.cancel()
        self._close()

    def _close(self) -> None:
        for play in self._plays:
            self._of.pool.end(play)

    def _verdict(self, row: int, verdict: Verdict) -> Verdict:
        if (fault := self._faults.get(self._group(row))) is not None:
            return no_verdict(ENVIRONMENT_ERROR + fault)
        own, more = self._earned[row].verdict, {"observation_tokens": float(self._given[row])}
        if self._of.gives_rewards:
            return Verdict(own | more, verdict.pred, None)
        if not verdict.numbers:
            return verdict
        return replace(verdict, numbers={"num_turns": own["num_turns"], **more, **verdict.numbers})

    def _first(self, replies: Sequence[Future[Reply]]) -> list[Reply]:
        """What the environment says to each group at the start."""
        found = [Reply() for _ in range(len(replies) // self.num_samples)]
        for row, reply in enumerate(replies):
            group = self._group(row)
            with self._faulty(row):
                said = self._result(reply)
                if row % self.num_samples and said != found[group]:
                    raise Fault("the episodes of a group begin differently, though they have one seed")
                found[group] = said
        return found

    def _prompt(self, chat: Chat, row: PromptRow, tokens: list[int], first: Reply) -> list[int]:
        if not first.messages:
            return tokens
        if not self._of.speaks_first.get(row.task, True):
            raise InputError(
                f"the environment says something at the start for {row.origin}, but said nothing for the first row: "
                "let reset return an observation for all rows or for none"
            )
        tokens, most = chat.prompt(row, first.messages), self._of.max_prompt_length
        if len(tokens) > most:
            raise InputError(
                f"the prompt of {row.origin} has {len(tokens)} tokens with what the environment says first, more than "
                f"data.max_prompt_length={most}: raise it, or lower environment.max_observation_length"
            )
        return tokens

    def _answer(self, pending: Pending, row: int, answer: Future[Reply]) -> None:
        """Continues an episode after what the environment has said, or ends it."""
        chat = self._chats[row]
        with self._faulty(row):
            reply = self._result(answer)
            self._take(row, reply)
            if reply.done or self._earned[row].turns >= chat.settings.max_turns:
                self._end(pending, row, "done" if reply.done else "max_turns")
                return
            said, cut = chat.cut(reply.messages)
            self._of.counts["cut"] += cut
            before = pending.tokens(row)
            tokens = chat.continuation(said, ended=before[-1] in chat.tokenizer.eos_ids)
            if not tokens:
                raise Fault("an observation without a token: let step say something, or set environment.turn_template")
            if len(before) + len(tokens) < pending.limit(row):
                pending.resume(row, tokens)
                self._turn_starts[row] = len(before) + len(tokens)
                self._given[row] += len(tokens)
            else:  # no room for them and a token of the policy
                self._end(pending, row, "length")
            return
        self._end(pending, row, "fault")

    def _take(self, row: int, reply: Reply) -> None:
        self._earned[row].take(reply)
        self._of.counts["invalid"] += reply.invalid

    def _end(self, pending: Pending, row: int, how: str) -> None:
        self._ended_by[row] = how
        pending.end(row, complete=how != "length")

    @contextmanager
    def _faulty(self, row: int) -> Iterator[None]:
        """A fault leaves out the whole group of the row."""
        try:
            yield
        except Fault as fault:
            logger.warning("%s: its group is left out", fault)
            self._faults.setdefault(self._group(row), str(fault))

    def _group(self, row: int) -> int:
        return row // self.num_samples

    def _result(self, answer: Future[Reply]) -> Reply:
        while wait([answer], timeout=WAIT_S).not_done:
            self._of.check()
        return answer.result()


def always(row: int, tokens: list[int]) -> bool:
    """Every turn of the policy is answered."""
    return True


def play(started: Sequence[tuple[Pending, Episodes]]) -> None:
    """Decodes until all responses that were started first have ended; meanwhile the others go on as well."""
    while started and not started[0][0].ended:
        started[0][0].step()
        for pending, episodes in started:
            episodes.advance(pending)
