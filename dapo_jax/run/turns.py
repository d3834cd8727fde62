"""Host: episodes of several turns while responses are sampled: what the environment says joins the response.

A response that the policy has ended waits for the environment, while a chunk of the others is decoded. Tokens, rewards
and the schedule depend on the policy, the prompts and what the environment says, not on how long that takes, nor in
which process it runs.
"""

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import chain

import numpy as np

from dapo_jax.data.containers import Rollout
from dapo_jax.data.rows import PromptRow
from dapo_jax.environments.episodes import Earned, columns_of, seed_of
from dapo_jax.environments.pool import Play
from dapo_jax.environments.protocol import Fault, Reply
from dapo_jax.errors import InputError
from dapo_jax.rewards.verdicts import ENVIRONMENT_ERROR, Verdict, no_verdict
from dapo_jax.rewards.verification import Verification
from dapo_jax.rollout.engine import Pending
from dapo_jax.run.episodes import Environments
from dapo_jax.run.replies import Asked, Heard, Turn, answered_turns, exchanged, has_group, result

logger = logging.getLogger(__name__)


class Episodes:
    """The episodes of Q prompts, in the place of their verification. Every process has the environments of its share.

    Args:
        rows, tokens: of each prompt; the environment may add to the tokens.
        verification: by reward functions, which have the whole chats; what the environment gives has precedence.
        held_out: whether these are problems to evaluate on, whose environments have other seeds.
        begun: responses to go on with, whose environments hear their turns once more.
        limits: [B] tokens at which each response pauses; None = it does not.

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
        *,
        held_out: bool,
        begun: Rollout | None = None,
        limits: np.ndarray | None = None,
    ) -> None:
        self._of, self._verification, self.check = environments, verification, environments.check
        num_samples = verification.num_samples
        self._numbers: list[int] = np.repeat(numbers, num_samples).tolist()  # of each row's prompt: its group
        chats = [environments.chats[row.task].of(row) for row in rows]
        self._chats = [chat for chat in chats for _ in range(num_samples)]
        count, self._longest = len(self._numbers), environments.data.max_response_length
        self._limits = [self._longest] * count if limits is None else limits.tolist()
        self._plays: list[Play | None] = [None] * count  # None = another process has it
        self._earned = [Earned(environments.settings.reward == "sum") for _ in range(count)]
        self._faults: dict[int, str] = {}  # by number
        self._ended_by: dict[int, str] = {}  # by row
        self.asked: Asked = {}  # to turns that wait
        self._last: Asked = {}  # to episodes that have ended
        self._turn_starts = [0] * count
        self._given = [0] * count  # tokens of the environment
        turns = [answered_turns(begun, row) for row in range(count)]
        [replies] = exchanged([self._begun(rows, turns, held_out)], self.check)
        opened = zip(chats, rows, self._first(replies)[::num_samples], strict=True)
        opened = [chat.opened(row, first.messages) for chat, row, first in opened]
        if begun is None:
            environments.counts["cut"] += num_samples * sum(cut for _, cut in opened)
        # Rows as they are asked: with what the environment says first.
        self.rows = verification.rows = [row for row, _ in opened]
        self.prompts = [self._prompt(*one) for one in zip(rows, tokens, self.rows, strict=True)]
        if begun is not None:
            for row in range(count):
                self._repeat(row, self.prompts[row] == tokens[row], turns[row], replies[row][1:])
            self.prompts = list(tokens)

    @property
    def texts(self) -> list[str]:
        """Whole chats."""
        return self._verification.texts

    def advance(self, pending: Pending, heard: Heard) -> None:
        """Hands the engine the replies to all turns that were asked, and the environment new turns."""
        self.asked = {}
        for row in sorted(heard):
            self._answer(pending, row, *heard[row])
        for row in pending.parked.tolist():  # of groups with a fault too: which row is first depends on the schedule
            self.asked[row] = self._ask(row, pending.tokens(row))

    def begin(self, ended: np.ndarray, rollout: Rollout) -> None:
        """As `Verification.begin`. A last turn that has filled the length of its episode is answered as well."""
        self._verification.begin(ended, rollout)
        for row in ended.tolist():
            tokens = rollout.responses[row][rollout.mask[row]].tolist()
            if row not in self._ended_by:
                if self._limits[row] <= len(tokens) < self._longest:
                    continue  # it pauses
                self._ended_by[row] = "length"
                self._last[row] = self._ask(row, tokens)
            if self._chats[row].tools and self._of.gives_rewards and self._ended_by[row] != "fault":
                play, last = self._plays[row], self._last.setdefault(row, [])
                last += [] if play is None else [self._of.pool.finish(play)]

    def wait(self) -> list[Verdict]:
        """The verdicts, in the order of the responses; those on episodes that pause are empty.

        A group in which the environment has failed has none.
        """
        verdicts = self._verification.wait()
        [last] = exchanged([self._last], self.check)
        for row, replies in last.items():
            for reply in replies:
                with self._faulty(row):
                    self._take(row, result(reply))
        self._of.counts.update(self._ended_by.values())
        self._close()
        return [self._verdict(row, verdict) for row, verdict in enumerate(verdicts)]

    def cancel(self) -> None:
        """As `Verification.cancel`."""
        self._verification.cancel()
        for reply in chain.from_iterable([*self.asked.values(), *self._last.values()]):
            reply.cancel()
        self._close()

    def _close(self) -> None:
        plays, self._plays = self._plays, []
        for play in plays:
            if play is not None:
                self._of.pool.end(play)

    def _verdict(self, row: int, verdict: Verdict) -> Verdict:
        if (fault := self._faults.get(self._numbers[row])) is not None:
            return no_verdict(ENVIRONMENT_ERROR + fault)
        if row not in self._ended_by:
            return verdict
        own, more = self._earned[row].verdict, {"observation_tokens": float(self._given[row])}
        own = own if self._of.gives_rewards else {"num_turns": own["num_turns"]}
        return self._of.judged(own | more, verdict)

    def _begun(self, rows: Sequence[PromptRow], turns: Sequence[Sequence[Turn]], held_out: bool) -> Asked:
        """Begins the episodes of this process, and repeats these turns."""
        asked: Asked = {}
        for row, number in enumerate(self._numbers):
            asked[row] = []
            if has_group(number):
                of_prompt = rows[row // self._verification.num_samples]
                seed = seed_of(self._of.seed, number, held_out=held_out)
                self._plays[row], first = self._of.pool.begin(seed, columns_of(of_prompt), of_prompt.task)
                asked[row] = [first, *chain.from_iterable(self._ask(row, turn.tokens) for turn in turns[row])]
        return asked

    def _first(self, replies: Heard) -> list[Reply]:
        """What the environment says at the start of each episode."""
        found: dict[int, Reply] = {}
        for row, number in enumerate(self._numbers):
            with self._faulty(row):
                said = result(replies[row][0])
                if found.setdefault(number, said) != said:
                    raise Fault("the episodes of a group begin differently, though they have one seed")
        return [found.get(number, Reply()) for number in self._numbers]

    def _prompt(self, row: PromptRow, tokens: list[int], opened: PromptRow) -> list[int]:
        if opened.prompt == row.prompt:
            return tokens
        if not self._of.speaks_first.get(row.task, True):
            raise InputError(
                f"the environment says something at the start for {row.origin}, but said nothing for the first row: "
                "let reset return an observation for all rows or for none"
            )
        tokens, most = self._of.chats[row.task].prompt(opened), self._of.data.max_prompt_length
        if len(tokens) > most:
            raise InputError(
                f"the prompt of {row.origin} has {len(tokens)} tokens with what the environment says first, more than "
                f"data.max_prompt_length={most}: raise it, or lower environment.max_observation_length"
            )
        return tokens

    def _repeat(self, row: int, same: bool, turns: Sequence[Turn], replies: Sequence[Reply | Fault]) -> None:
        """Takes the replies to turns of an earlier step, which must be as they were; `same`: so is the first."""
        with self._faulty(row):
            for turn, reply in zip(turns, replies, strict=True):
                said = result(reply)
                self._earned[row].take(said)
                same = same and not said.done and self._tokens(row, said, turn.tokens)[0] == turn.answer
                self._turn_starts[row] += len(turn.tokens) + len(turn.answer)
                self._given[row] += len(turn.answer)
            if not same:
                raise Fault(
                    "the environment says something else when the turns of an earlier step are repeated with the same "
                    "seed: let it draw from the seed alone"
                )

    def _ask(self, row: int, tokens: list[int]) -> list[Future[Reply]]:
        """Hands the environment the last turn of a response, if this process has it."""
        play = self._plays[row]
        if play is None:
            return []
        return [self._of.pool.step(play, self._chats[row].text_of(tokens[self._turn_starts[row] :]))]

    def _answer(self, pending: Pending, row: int, answer: Reply | Fault) -> None:
        """Continues an episode after what the environment has said, or ends it."""
        with self._faulty(row):
            reply = result(answer)
            self._take(row, reply)
            if reply.done or self._earned[row].turns >= self._of.settings.max_turns:
                self._end(pending, row, "done" if reply.done else "max_turns")
                return
            before = pending.tokens(row)
            tokens, cut = self._tokens(row, reply, before)
            self._of.counts["cut"] += cut
            if not tokens:
                raise Fault("an observation without a token: let step say something, or set environment.turn_template")
            length = len(before) + len(tokens)
            if length >= self._longest:  # no room for them and a token of the policy
                self._end(pending, row, "length")
                return
            self._turn_starts[row] = length
            self._given[row] += len(tokens)
            if length < self._limits[row]:
                pending.resume(row, tokens)
            else:
                pending.end(row, tokens, complete=False)
            return
        self._end(pending, row, "fault")

    def _tokens(self, row: int, reply: Reply, before: Sequence[int]) -> tuple[list[int], int]:
        """What the environment says, as tokens after those before, and how many of its messages were cut."""
        chat = self._chats[row]
        said, cut = chat.cut(reply.messages)
        return chat.continuation(said, ended=before[-1] in chat.tokenizer.eos_ids), cut

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
            self._faults.setdefault(self._numbers[row], str(fault))


def always(row: int, tokens: list[int]) -> bool:
    """Every turn of the policy is answered."""
    return True


def play(started: Sequence[tuple[Pending, Episodes]]) -> None:
    """Decodes until all responses that were started first have ended; meanwhile the others go on as well.

    It waits for all answers to the turns before each chunk, so that the schedule does not depend on how long they take.
    """
    while started and not started[0][0].ended:
        started[0][0].step()
        heard = exchanged([episodes.asked for _, episodes in started], started[0][1].check)
        for (pending, episodes), replies in zip(started, heard, strict=True):
            episodes.advance(pending, replies)
