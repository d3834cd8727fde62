"""Host: requests to an engine, and responses while they are being sampled."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from dapo_jax.data.containers import Rollout
from dapo_jax.errors import InputError
from dapo_jax.models.transformer import Params
from dapo_jax.parallel.sharding import fetch
from dapo_jax.rollout.decoding import Chunk
from dapo_jax.rollout.expert_records import ExpertRecords
from dapo_jax.rollout.layout import EngineSettings
from dapo_jax.rollout.rows import ALIVE, ENDED, WAITS
from dapo_jax.rollout.sampling import Sampling

# (tokens of a response since it last returned, how many of them an earlier call has seen) -> how many of them to keep;
# None = it continues.
StopRule = Callable[[list[int], int], int | None]
# (rows of the responses that have just ended, all responses so far)
OnFinished = Callable[[np.ndarray, Rollout], None]
# (row, tokens of a response that the policy has ended) -> whether it waits for tokens of an environment.
Waits = Callable[[int, list[int]], bool]


@dataclass(frozen=True, eq=False)
class Request:
    """How prompts are sampled. Those of one request share a queue; the last fields but two decide its sizes."""

    params: Params  # decoding weights (learner/decode_weights.py), with the same shapes and dtypes in all requests
    num_samples: int  # responses to each prompt
    purpose: int  # training, evaluation, ... (sampling.py)
    sampling: Sampling
    prompt_lengths: Sequence[int] | np.ndarray = ()  # [N] tokens of prompts as long as those that will be submitted
    num_prompts: int = 0  # that will be submitted, about
    max_tokens: int | None = None  # most to draw for a response; None = max_response_length
    stop: StopRule | None = None  # ends a response at a stop string
    waits: Waits | None = None  # whether a response that has ended waits for tokens of an environment; None = none does
    turn_length: int = 0  # tokens that the policy may write between two of these waits; 0 = any


@dataclass(frozen=True)
class Begun:
    """Responses to continue, one to each of Q prompts."""

    samples: np.ndarray  # [Q], which sample of its prompt each is: with the prompt's number the address of its draws
    responses: Rollout  # Q rows: the tokens drawn so far, and their log-probabilities


class Responses:
    """Responses as they grow, row by row, and which of them have ended.

    Args:
        limits: [B], most tokens of each response, at most max_response_length.
        turn_length: as in Request.
        begun: the first tokens of each response, which the engine has as the end of its prompt.
    """

    def __init__(
        self,
        limits: np.ndarray,
        settings: EngineSettings,
        *,
        stop: StopRule | None = None,
        waits: Waits | None = None,
        turn_length: int = 0,
        begun: Rollout | None = None,
        on_finished: OnFinished | None = None,
    ) -> None:
        shape = len(limits), settings.max_response_length
        self.tokens = np.full(shape, settings.pad_id, np.int32)
        self.mask = np.zeros(shape, bool)
        self.logprobs = np.zeros(shape, np.float32)
        self.complete = np.zeros(len(limits), bool)  # ended by an end-of-sequence token or the stop rule
        self.ended = np.zeros(len(limits), bool)  # complete, or at its limit
        self.parked = np.zeros(len(limits), bool)  # waits for tokens of an environment
        self.by_policy = np.zeros(shape, bool)  # those of `mask` that no environment wrote
        self.limits, self.settings = limits, settings
        self.stop, self.waits, self.on_finished = stop, waits, on_finished
        self.records: ExpertRecords | None = None  # of the experts of tokens, if they are kept
        if begun is not None:
            self.tokens[:], self.mask[:], self.logprobs[:] = begun.responses, begun.mask, begun.logprobs
            self.by_policy[:] = begun.mask & (True if begun.by_policy is None else begun.by_policy)
        given = self.mask & ~self.by_policy
        last = shape[1] - np.argmax(given[:, ::-1], axis=1)
        self.turns = np.where(given.any(axis=1), last, 0)  # [B] where the newest begins; 0 = all is the policy's
        self.begun: np.ndarray = self.mask.sum(axis=1)  # [B] tokens
        self.lengths = self.begun.copy()  # [B] tokens so far
        self.turn_length = turn_length or settings.max_response_length
        self.ends = np.minimum(self.turns + self.turn_length, limits)  # [B], most tokens with this turn

    def add(self, chunk: Chunk, rows: np.ndarray, starts: np.ndarray | int) -> None:
        """Adds a chunk whose first token is number `starts`, [B] or one for all, of what is drawn for `rows` [B]."""
        pad_id, alive = self.settings.pad_id, self.states(rows) == ALIVE
        rows = rows[alive]
        starts = self.begun[rows] + np.broadcast_to(starts, alive.shape)[alive]
        places = starts[:, None] + np.arange(chunk.tokens.shape[1])
        known = self.lengths[rows]  # a row that was given up, or has waited, is read again
        within = (places >= known[:, None]) & (places < self.ends[rows, None])
        taken = chunk.mask[alive] & within
        row, place = np.broadcast_to(rows[:, None], places.shape)[within], places[within]
        self.mask[row, place] = self.by_policy[row, place] = taken[within]
        self.tokens[row, place] = np.where(taken, chunk.tokens[alive], pad_id)[within]
        self.logprobs[row, place] = np.where(taken, chunk.logprobs[alive], 0.0)[within]
        self.lengths[rows] += taken.sum(axis=1)
        self.complete[rows] = np.any(np.isin(chunk.tokens[alive], self.settings.eos_ids) & taken, axis=1)
        if self.stop is not None:
            for at, start, turn in zip(rows.tolist(), known.tolist(), self.turns[rows].tolist(), strict=True):
                kept = self.stop(self.tokens[at, turn : self.lengths[at]].tolist(), start - turn)
                if kept is not None:
                    kept += turn
                    self.mask[at, kept:] = self.by_policy[at, kept:] = False
                    self.tokens[at, kept:], self.logprobs[at, kept:] = pad_id, 0.0
                    self.lengths[at], self.complete[at] = kept, True
        self.ended[rows] = self.complete[rows] | (self.lengths[rows] >= self.ends[rows])
        if self.waits is not None:
            self._park(rows, self.waits)
        if self.records is not None and chunk.experts is not None:  # those of a prompt come in a call of their own
            self.records.add_chunk(rows, starts, np.asarray(chunk.experts)[alive])
        self._finish(rows[self.ended[rows]])

    def _park(self, rows: np.ndarray, waits: Waits) -> None:
        """Rows that the policy has ended wait, if they have room and are to."""
        for row in rows[self.complete[rows] & (self.lengths[rows] < self.settings.max_response_length)].tolist():
            if waits(row, self.tokens[row, : self.lengths[row]].tolist()):
                self.parked[row], self.complete[row], self.ended[row] = True, False, False

    def _finish(self, rows: np.ndarray) -> None:
        """Hands on rows that have ended."""
        if self.records is not None:
            for row in rows.tolist():
                own = np.flatnonzero(self.by_policy[row])
                self.records.end(row, int(own.max(initial=-1)) + 1)  # what the environment said last is not fed yet
        if self.on_finished is not None and rows.size:
            self.on_finished(rows, self.rollout())

    def append(self, row: int, tokens: Sequence[int], limit: int | None = None) -> None:
        """A row that waits goes on after these tokens, which the policy has not written; raises as `Pending.resume`.

        Args:
            limit: tokens until which there is room; None = its own.
        """
        known, limit = int(self.lengths[row]), int(self.limits[row]) if limit is None else limit
        if not self.parked[row] or not 0 < len(tokens) < limit - known:
            raise InputError(
                f"{len(tokens)} tokens for row {row} must be at least one and fewer than {limit - known}, and it must "
                "wait for them"
            )
        new = slice(known, known + len(tokens))
        self.tokens[row, new], self.mask[row, new] = tokens, True
        self.lengths[row] = self.turns[row] = new.stop
        self.parked[row], self.ends[row] = False, min(new.stop + self.turn_length, limit)

    def end(self, row: int, complete: bool) -> None:
        """A row that waits ends."""
        self.parked[row], self.complete[row], self.ended[row] = False, complete, True
        self._finish(np.array([row]))

    def states(self, rows: np.ndarray) -> np.ndarray:
        """[b] as `queue.Outcome`; ENDED for -1."""
        found = np.where(self.parked[rows], WAITS, np.where(self.ended[rows], ENDED, ALIVE))
        return np.where(rows >= 0, found, ENDED)

    def are_given(self, rows: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
        """As `queue.Outcome`; False for row -1."""
        places = (starts + self.begun[rows])[:, None] + np.arange(length)
        at = rows[:, None], np.minimum(places, self.mask.shape[1] - 1)
        return (rows >= 0)[:, None] & (places < self.mask.shape[1]) & self.mask[at] & ~self.by_policy[at]

    def drawn(self) -> np.ndarray:
        """[B] tokens of each response so far, after those that it has begun with."""
        return self.lengths - self.begun

    def written(self) -> np.ndarray:
        """[B] of these, the tokens that the policy wrote."""
        return np.sum(self.by_policy & (np.arange(self.mask.shape[1]) >= self.begun[:, None]), axis=1)

    def rollout(self) -> Rollout:
        """The responses so far; their experts are not known before they end."""
        by_policy = self.by_policy if self.turns.any() else None
        return Rollout(self.tokens, self.mask, self.logprobs, self.complete, by_policy)


class JoinedResponses:
    """Responses of several blocks of prompts, as the rows of one queue; those of absent blocks have ended."""

    def __init__(self) -> None:
        self.parts: dict[int, Responses] = {}  # by their first row

    def add(self, chunk: Chunk, rows: np.ndarray, starts: np.ndarray) -> int:
        """As `Responses.add`, of what lies on the devices; returns how many tokens of a row the chunk has."""
        recorded = any(part.records is not None for part in self.parts.values())
        chunk = fetch(chunk if recorded else dataclasses.replace(chunk, experts=None))
        if chunk.count is not None:
            count = int(chunk.count)
            chunk = jax.tree.map(lambda x: x[:, :count], dataclasses.replace(chunk, count=None))
        for part, own in self._parts_of(rows):
            part.add(chunk, own, starts)
        return chunk.tokens.shape[1]

    def add_prompts(self, prompts: np.ndarray, fed: np.ndarray, experts: np.ndarray) -> None:
        """As `ExpertRecords.add_prompts`."""
        for first, part in self.parts.items():
            if part.records is not None:
                own = prompts - first // part.records.num_samples
                here = (own >= 0) & (own < len(part.records.prompts))
                part.records.add_prompts(own[here].tolist(), fed[here].tolist(), experts[here])

    def states(self, rows: np.ndarray) -> np.ndarray:
        """As `Responses.states`."""
        return np.max([np.full(len(rows), ENDED), *(part.states(own) for part, own in self._parts_of(rows))], axis=0)

    def are_given(self, rows: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
        """As `Responses.are_given`."""
        found = [part.are_given(own, starts, length) for part, own in self._parts_of(rows)]
        return np.any([np.zeros((len(rows), length), bool), *found], axis=0)

    def add_known(self, rows: np.ndarray, starts: np.ndarray, experts: np.ndarray) -> None:
        """As `ExpertRecords.add_chunk`, of tokens that were known."""
        for part, own in self._parts_of(rows):
            if part.records is not None:
                here = own >= 0
                part.records.add_chunk(own[here], part.begun[own[here]] + starts[here], experts[here])

    def tokens_of(self, row: int) -> np.ndarray:
        """Tokens of a response after those that it has begun with, as far as they are known."""
        for first, part in self.parts.items():
            if first <= row < first + len(part.limits):
                return part.tokens[row - first, part.begun[row - first] : part.lengths[row - first]]
        return np.zeros(0, np.int32)

    def most_of(self, row: int) -> int:
        """Tokens of a response after those that it has begun with, at most, unless it returns once more."""
        for first, part in self.parts.items():
            if first <= row < first + len(part.limits):
                return int(part.ends[row - first] - part.begun[row - first])
        return 0

    def _parts_of(self, rows: np.ndarray) -> Iterator[tuple[Responses, np.ndarray]]:
        """Each part, with `rows` as it numbers them, -1 for those of other parts."""
        for first, part in self.parts.items():
            yield part, np.where((rows >= first) & (rows < first + len(part.limits)), rows - first, -1)
