"""Host: responses while they are being sampled."""

import dataclasses
from typing import Any

import numpy as np

from dapo_jax.data.containers import Rollout
from dapo_jax.parallel.sharding import fetch
from dapo_jax.rollout.decoding import Chunk
from dapo_jax.rollout.engine import OnFinished, StopRule
from dapo_jax.rollout.expert_records import ExpertRecords


class Responses:
    """Responses as they grow, row by row, and which of them have ended."""

    def __init__(
        self,
        limits: np.ndarray,
        *,
        max_length: int,
        eos_ids: tuple[int, ...],
        pad_id: int,
        stop: StopRule | None,
        on_finished: OnFinished | None,
        begun: Rollout | None = None,
    ) -> None:
        """
        Args:
            limits: [B], most tokens of each response, at most max_length.
            stop, on_finished: as for `Generation.add`.
            begun: the first tokens of each response, which the engine has as the end of its prompt.
        """
        shape = len(limits), max_length
        self.tokens = np.full(shape, pad_id, np.int32)
        self.mask = np.zeros(shape, bool)
        self.logprobs = np.zeros(shape, np.float32)
        self.complete = np.zeros(len(limits), bool)  # ended by an end-of-sequence token or the stop rule
        self.ended = np.zeros(len(limits), bool)  # complete, or at its limit
        self.limits, self.eos_ids, self.pad_id, self.stop, self.on_finished = limits, eos_ids, pad_id, stop, on_finished
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
        within = places < self.limits[rows, None]
        taken = chunk.mask[alive] & within
        row, place = np.broadcast_to(rows[:, None], places.shape)[within], places[within]
        self.mask[row, place] = taken[within]
        self.tokens[row, place] = np.where(taken, chunk.tokens[alive], self.pad_id)[within]
        self.logprobs[row, place] = np.where(taken, chunk.logprobs[alive], 0.0)[within]
        self.complete[rows] = np.any(np.isin(chunk.tokens[alive], self.eos_ids) & taken, axis=1)
        if self.stop is not None:
            self._stop(rows, starts, self.stop)
        self.ended[rows] = self.complete[rows] | (places[:, -1] + 1 >= self.limits[rows])
        if self.records is not None:
            self._record(self.records, chunk.experts, alive, rows, starts)
        if self.on_finished is not None and self.ended[rows].any():
            self.on_finished(rows[self.ended[rows]], self.rollout())

    def _stop(self, rows: np.ndarray, starts: np.ndarray, stop: StopRule) -> None:
        for row, start in zip(rows, starts, strict=True):
            kept = stop(self.tokens[row][self.mask[row]].tolist(), int(start))
            if kept is not None:
                self.mask[row, kept:], self.tokens[row, kept:], self.logprobs[row, kept:] = False, self.pad_id, 0.0
                self.complete[row] = True

    def _record(
        self, records: ExpertRecords, experts: Any, alive: np.ndarray, rows: np.ndarray, starts: np.ndarray
    ) -> None:
        if experts is not None:  # waves draw the first token in prefill
            records.add_chunk(rows, starts, experts[alive])
        for row in rows[self.ended[rows]].tolist():
            records.end(row, int(self.mask[row].sum()))

    def alive(self, rows: np.ndarray) -> np.ndarray:
        """True for rows of a wave that belong to a response that has not ended."""
        return (rows >= 0) & ~self.ended[rows]

    def longest(self, rows: np.ndarray) -> int:
        """Tokens to draw after which all responses of a wave have reached their limits."""
        return int(self.room()[rows[rows >= 0]].max())

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
        return Rollout(self.tokens, self.mask, self.logprobs, self.complete)


class JoinedResponses:
    """Responses of several blocks of prompts, as the rows of one walk; those of absent blocks have ended."""

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
        alive = np.zeros(len(rows), bool)
        for first, part in self.parts.items():
            alive |= part.alive(_own_rows(first, part, rows))
        return alive


def _fetched(chunk: Chunk, *records: ExpertRecords | None) -> Chunk:
    """The chunk on the host, without its experts unless they are recorded."""
    wanted = any(one is not None for one in records)
    return fetch(chunk if wanted else dataclasses.replace(chunk, experts=None))


def _own_rows(first: int, part: Responses, rows: np.ndarray) -> np.ndarray:
    """`rows` as numbered in `part`, which begins with row `first`; -1 for those of other parts."""
    return np.where((rows >= first) & (rows < first + len(part.limits)), rows - first, -1)
