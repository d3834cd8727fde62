"""Host: responses while they are being sampled."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dapo_jax.data.containers import Rollout
from dapo_jax.errors import InputError
from dapo_jax.parallel.sharding import fetch
from dapo_jax.rollout.decoding import Chunk
from dapo_jax.rollout.expert_records import ExpertRecords

# (tokens of a response, how many of them an earlier call has seen) -> how many tokens to keep; None = it continues.
StopRule = Callable[[list[int], int], int | None]
# (rows of the responses that have just ended, all responses so far)
OnFinished = Callable[[np.ndarray, Rollout], None]
# (row, tokens of a response that the policy has ended) -> whether it waits for tokens of an environment.
Waits = Callable[[int, list[int]], bool]


class Responses:
    """Responses as they grow, row by row, and which of them have ended.

    Args:
        limits: [B], most tokens of each response, at most max_length.
        begun: the first tokens of each response, which the engine has as the end of its prompt.
    """

    def __init__(
        self,
        limits: np.ndarray,
        *,
        max_length: int,
        eos_ids: tuple[int, ...],
        pad_id: int,
        stop: StopRule | None,
        on_finished: OnFinished | None,
        waits: Waits | None = None,
        begun: Rollout | None = None,
    ) -> None:
        shape = len(limits), max_length
        self.tokens = np.full(shape, pad_id, np.int32)
        self.mask = np.zeros(shape, bool)
        self.logprobs = np.zeros(shape, np.float32)
        self.complete = np.zeros(len(limits), bool)  # ended by an end-of-sequence token or the stop rule
        self.ended = np.zeros(len(limits), bool)  # complete, or at its limit
        self.parked = np.zeros(len(limits), bool)  # waits for tokens of an environment
        self.given = np.zeros(shape, bool)  # tokens of an environment
        self.limits, self.eos_ids, self.pad_id = limits, eos_ids, pad_id
        self.stop, self.on_finished, self.waits = stop, on_finished, waits
        self.records: ExpertRecords | None = None  # of the experts of tokens, if they are kept
        if begun is not None:
            self.tokens[:], self.mask[:], self.logprobs[:] = begun.responses, begun.mask, begun.logprobs
        self.begun: np.ndarray = self.mask.sum(axis=1)  # [B] tokens

    def add(self, chunk: Chunk, rows: np.ndarray, starts: np.ndarray | int) -> None:
        """Adds a chunk whose first token is number `starts`, [B] or one for all, of what is drawn for `rows` [B]."""
        chunk = _fetched(chunk, self.records)
        alive = self.alive(rows)
        rows = rows[alive]
        starts = self.begun[rows] + np.broadcast_to(starts, alive.shape)[alive]
        places = starts[:, None] + np.arange(chunk.tokens.shape[1])
        known = self.mask[rows].sum(axis=1)  # a row that was given up, or has waited, is read again
        within = (places >= known[:, None]) & (places < self.limits[rows, None])
        taken = chunk.mask[alive] & within
        row, place = np.broadcast_to(rows[:, None], places.shape)[within], places[within]
        self.mask[row, place] = taken[within]
        self.tokens[row, place] = np.where(taken, chunk.tokens[alive], self.pad_id)[within]
        self.logprobs[row, place] = np.where(taken, chunk.logprobs[alive], 0.0)[within]
        self.complete[rows] = np.any(np.isin(chunk.tokens[alive], self.eos_ids) & taken, axis=1)
        if self.stop is not None:
            self._stop(rows, known, self.stop)
        self.ended[rows] = self.complete[rows] | (places[:, -1] + 1 >= self.limits[rows])
        if self.waits is not None:
            self._park(rows, self.waits)
        if self.records is not None:
            self._record(self.records, chunk.experts, alive, rows, starts)
        self._hand_on(rows[self.ended[rows]])

    def _hand_on(self, rows: np.ndarray) -> None:
        if self.on_finished is not None and rows.size:
            self.on_finished(rows, self.rollout())

    def _park(self, rows: np.ndarray, waits: Waits) -> None:
        """Rows that the policy has ended wait, if they have room and are to."""
        lengths = self.mask.sum(axis=1)
        for row in rows[self.complete[rows] & (lengths[rows] < self.limits[rows])].tolist():
            if waits(row, self.tokens[row, : lengths[row]].tolist()):
                self.parked[row], self.complete[row], self.ended[row] = True, False, False

    def append(self, row: int, tokens: Sequence[int]) -> None:
        """A row that waits goes on after these tokens, which the policy has not written.

        Raises:
            InputError: the row does not wait, or has no room for the tokens and one of the policy.
        """
        known, limit = int(self.mask[row].sum()), int(self.limits[row])
        if not self.parked[row] or not 0 < len(tokens) < limit - known:
            raise InputError(
                f"{len(tokens)} tokens for row {row} must be at least one and fewer than {limit - known}, and it must "
                "wait for them"
            )
        new = slice(known, known + len(tokens))
        self.tokens[row, new], self.mask[row, new], self.given[row, new] = tokens, True, True
        self.parked[row] = False

    def end(self, row: int) -> None:
        """A row that waits ends as it is."""
        self.parked[row], self.complete[row], self.ended[row] = False, True, True
        if self.records is not None:
            self.records.end(row, int(self.mask[row].sum()))
        self._hand_on(np.array([row]))

    def _stop(self, rows: np.ndarray, starts: np.ndarray, stop: StopRule) -> None:
        for row, start in zip(rows, starts, strict=True):
            kept = stop(self.tokens[row, self.mask[row]].tolist(), int(start))
            if kept is not None:
                self.mask[row, kept:], self.tokens[row, kept:], self.logprobs[row, kept:] = False, self.pad_id, 0.0
                self.complete[row] = True

    def _record(
        self, records: ExpertRecords, experts: Any, alive: np.ndarray, rows: np.ndarray, starts: np.ndarray
    ) -> None:
        if experts is not None:  # those of a prompt come in a call of their own
            records.add_chunk(rows, starts, experts[alive])
        for row in rows[self.ended[rows]].tolist():
            records.end(row, int(self.mask[row].sum()))

    def alive(self, rows: np.ndarray) -> np.ndarray:
        """[b] True for rows that have not ended and do not wait; False for -1."""
        return (rows >= 0) & ~(self.ended | self.parked)[rows]

    def waiting(self, rows: np.ndarray) -> np.ndarray:
        """[b] True for rows that wait; False for -1."""
        return (rows >= 0) & self.parked[rows]

    def room(self) -> np.ndarray:
        """[B] most tokens to draw for each response."""
        return self.limits - self.begun

    def drawn(self) -> np.ndarray:
        """[B] tokens drawn for each response so far."""
        return self.mask.sum(axis=1) - self.begun

    def begun_tokens(self) -> list[list[int]]:
        """[B] the tokens that each response has begun with."""
        return [tokens[:count].tolist() for tokens, count in zip(self.tokens, self.begun, strict=True)]

    def rollout(self) -> Rollout:
        """The responses so far; their experts are not known before they end."""
        by_policy = self.mask & ~self.given if self.given.any() else None
        return Rollout(self.tokens, self.mask, self.logprobs, self.complete, by_policy)


class JoinedResponses:
    """Responses of several blocks of prompts, as the rows of one queue; those of absent blocks have ended."""

    def __init__(self) -> None:
        self.parts: dict[int, Responses] = {}  # by their first row

    def add(self, chunk: Chunk, rows: np.ndarray, starts: np.ndarray) -> None:
        """As `Responses.add`."""
        chunk = _fetched(chunk, *(part.records for part in self.parts.values()))
        for first, part in self.parts.items():
            part.add(chunk, _own_rows(first, part, rows), starts)

    def add_prompts(self, prompts: np.ndarray, fed: np.ndarray, experts: np.ndarray) -> None:
        """As `ExpertRecords.add_prompts`."""
        for first, part in self.parts.items():
            if part.records is not None:
                own = prompts - first // part.records.num_samples
                here = (own >= 0) & (own < len(part.records.prompts))
                part.records.add_prompts(own[here].tolist(), fed[here].tolist(), experts[here])

    def alive(self, rows: np.ndarray) -> np.ndarray:
        """As `Responses.alive`."""
        return self._any(rows, Responses.alive)

    def waiting(self, rows: np.ndarray) -> np.ndarray:
        """As `Responses.waiting`."""
        return self._any(rows, Responses.waiting)

    def tokens_of(self, row: int) -> np.ndarray:
        """Tokens of a response after those that it has begun with, as far as they are known."""
        for first, part in self.parts.items():
            if first <= row < first + len(part.limits):
                return part.tokens[row - first, part.begun[row - first] : part.mask[row - first].sum()]
        return np.zeros(0, np.int32)

    def _any(self, rows: np.ndarray, ask: Callable[[Responses, np.ndarray], np.ndarray]) -> np.ndarray:
        found = np.zeros(len(rows), bool)
        for first, part in self.parts.items():
            found |= ask(part, _own_rows(first, part, rows))
        return found


def _fetched(chunk: Chunk, *records: ExpertRecords | None) -> Chunk:
    """The chunk on the host, without its experts unless they are recorded."""
    wanted = any(one is not None for one in records)
    return fetch(chunk if wanted else dataclasses.replace(chunk, experts=None))


def _own_rows(first: int, part: Responses, rows: np.ndarray) -> np.ndarray:
    """`rows` as numbered in `part`, which begins with row `first`; -1 for those of other parts."""
    return np.where((rows >= first) & (rows < first + len(part.limits)), rows - first, -1)
