"""Host: what the devices do for the turns of a queue."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from dapo_jax.data.padding import pad_prompts
from dapo_jax.models.paged_attention import attend_gathered
from dapo_jax.parallel.compilation import Programs
from dapo_jax.parallel.sharding import batch_sharding, fetch, put
from dapo_jax.rollout.counting import Counting, Opened, RowStates, Seen, Turn
from dapo_jax.rollout.decoding import Chunk, FirstDraws, Plan, Reading
from dapo_jax.rollout.layout import PrefillSize, ReadSize, Shape
from dapo_jax.rollout.programs import Calls
from dapo_jax.rollout.queue import Queue
from dapo_jax.rollout.responses import JoinedResponses, Request
from dapo_jax.rollout.rows import Known
from dapo_jax.rollout.sampling import TRAIN
from dapo_jax.rollout.stretches import begun, resized


class QueueDevices(Counting):
    """What works off the queue of a request: the slots, and the keys and values of their rows."""

    def __init__(self, calls: Calls, programs: Programs, request: Request) -> None:
        super().__init__(calls.settings.arch, calls.layout, gathers=calls.attend is attend_gathered)
        self.calls, self.programs, self.request = calls, programs, request
        self.queue, self.responses = Queue(self.layout, lookahead=calls.settings.lookahead), JoinedResponses()
        self.pad_id = calls.settings.pad_id
        self.address = np.int32(calls.settings.seed), np.int32(request.purpose)  # the first parts of those of all draws
        self.held: Any = None  # while there are prompts
        self.shape = self.layout.first_shape
        self.prompts: list[Sequence[int]] = []
        # Of each row: tokens and last token of its prompt, number, sample, tokens begun. Row -1, the last, is no row.
        self.rows = np.array([[1], [self.pad_id], [-1], [0], [0]], np.int32)
        # Calls of prefill whose prompts' experts are to be recorded: prompts, their places in the call, experts.
        self.unread: list[tuple[np.ndarray, np.ndarray, jax.Array]] = []
        for shape in [self.shape] if self.layout.stretches else [Shape(slots) for slots in self.layout.ladder]:
            programs.prepare(*self._program(shape))
        for size in itertools.chain(*self.layout.reads):
            programs.prepare(*self._reading(size))

    def add(
        self, prompts: Sequence[Sequence[int]], numbers: np.ndarray, samples: np.ndarray, begun: np.ndarray
    ) -> None:
        """Adds prompts, and of each of their rows the prompt's number, the sample, and the tokens that it has begun."""
        if self.held is None:
            self.held, self.shape = self.calls.empty()(), self.layout.first_shape
        of_prompts = np.array([(len(prompt), prompt[-1]) for prompt in prompts], np.int32).T
        new = np.stack([*np.repeat(of_prompts, self.layout.num_samples, axis=1), numbers, samples, begun])
        self.rows = np.concatenate([self.rows[:, :-1], new.astype(np.int32), self.rows[:, -1:]], axis=1)
        self.prompts.extend(prompts)

    def prefill(self, size: PrefillSize, opened: Sequence[Opened]) -> tuple[Chunk, np.ndarray] | None:
        """As `Counting`: prompts without their last token, unless its rows' first token is drawn."""
        super().prefill(size, opened)
        layout, count = self.layout, self.layout.shards * size.at_once
        prompts: list[Sequence[int]] = [[self.pad_id]] * count
        used, at = [0] * layout.shards, []
        for one in opened:
            at.append(one.shard * size.at_once + used[one.shard])
            used[one.shard] += 1
            prompts[at[-1]] = self.prompts[one.prompt][: self._fed(one.prompt)]
        rows, first = np.full((count, layout.num_samples), -1), None
        for place, one in zip(at, opened, strict=True):
            rows[place] = layout.rows(one.prompt)
        rows = rows.reshape(-1)
        if layout.prefilled:
            first = FirstDraws(*self.rows[2:, rows])
        padded = pad_prompts(prompts, size.width, self.pad_id)
        given = self._put((*padded, self._places(size, opened, at), first))
        self.held, chunk, experts = self.calls.prefill(
            self.request.params, self.held, *given, self.request.sampling, *self.address
        )
        if experts is not None and self.request.purpose == TRAIN:
            self.unread.append((np.array([one.prompt for one in opened]), np.array(at), experts))
        return None if chunk is None else (chunk, rows)

    def decode(self, turn: Turn) -> Chunk:
        """As `Counting`."""
        super().decode(turn)
        prompt_lengths, last_tokens, numbers, samples, started = self.rows[:, turn.rows]
        begins, sources = (turn.rows >= 0) & (turn.sources < 0), turn.sources
        for slot in np.flatnonzero((begins | turn.returns) & (turn.sampled > 0)).tolist():
            last_tokens[slot] = self.responses.tokens_of(turn.rows[slot])[turn.sampled[slot] - 1]
        if self.layout.stretches:
            sources = self._with_stretches(turn, begins)
        sources = np.where(turn.returns, -1, sources)
        given, room = self._given(turn) if self.layout.returns else (None, None)
        plan = Plan(
            sources=sources,
            first_tokens=last_tokens,
            numbers=numbers,
            samples=samples,
            prompt_lengths=prompt_lengths,
            begun=started,
            sampled=turn.sampled,
            table=turn.table,
            destinations=turn.destinations,
            states=turn.states,
            windows=turn.windows,
            runs=turn.runs,
            given=given,
            room=room,
        )
        program = self.programs.get(*self._program(turn.shape))
        self.held, chunk = program(
            self.request.params, self.held, self._put(plan), self.request.sampling, *self.address
        )
        self._record_prompts()
        return chunk

    def read(self, size: ReadSize, known: Sequence[Sequence[Known]]) -> None:
        """As `Counting`."""
        super().read(size, known)
        layout, count = self.layout, size.rows * self.layout.shards
        tokens, table = np.zeros((count, size.tokens), np.int32), np.zeros((count, layout.row_pages), np.int32)
        numbers, lengths, sampled, first = np.full(count, -1), *np.zeros((3, count), np.int32)
        follows = np.zeros(count, bool)
        pages, window_pages, states = np.zeros((3, count, 2), np.int32)
        windows = Seen(np.zeros((count, layout.reach), np.int32), first, window_pages)
        for shard, of_shard in enumerate(known):
            for at, one in enumerate(of_shard, shard * size.rows):
                numbers[at], sampled[at], table[at] = one.row, one.sampled, one.table
                (pages[at], window_pages[at]), states[at] = one.destinations, one.states
                follows[at] = at > shard * size.rows and numbers[at - 1] == one.row
                windows.table[at, : len(one.seen)], first[at] = one.seen, one.held - len(one.seen)
                lengths[at], last = self.rows[:2, one.row]
                fed = np.concatenate([[last], self.responses.tokens_of(one.row)])
                tokens[at] = fed[one.sampled : one.sampled + size.tokens]
        optional = RowStates(*states.T) if layout.states else None, windows if layout.reach else None
        reading = self._put(Reading(tokens, lengths, sampled, follows, table, pages, *optional))
        self.held, experts = self.programs.get(*self._reading(size))(self.request.params, self.held, reading)
        if experts is not None and self.request.purpose == TRAIN:
            self.responses.add_known(numbers, sampled, fetch(experts))

    def _with_stretches(self, turn: Turn, begins: np.ndarray) -> np.ndarray:
        """Gives what is held the shape of the turn, and rows that begin their prompts; returns where rows then are."""
        if turn.shape != self.shape:
            self.held = resized(self.held, self._put(turn.sources), stretch=turn.shape.stretch)
            self.shape = turn.shape
        if begins.any():
            self.held = begun(self.held, self._put(begins), self._put(turn.table[:, 0]))
        slots = np.tile(np.arange(turn.shape.slots, dtype=np.int32), self.layout.shards)
        return np.where(turn.sources < 0, -1, slots)

    def _given(self, turn: Turn) -> tuple[np.ndarray, np.ndarray]:
        """[b, C] tokens of responses that are known already, -1 = none: a row that returns reads them; and `room`."""
        given, room = np.full((len(turn.rows), self.layout.chunk), -1, np.int32), np.zeros(len(turn.rows), np.int32)
        for slot in np.flatnonzero(turn.rows >= 0).tolist():
            row, first = int(turn.rows[slot]), int(turn.sampled[slot])
            known = self.responses.tokens_of(row)[first : first + self.layout.chunk]
            given[slot, : len(known)] = known
            stops = turn.counts[slot] < self.layout.chunk
            room[slot] = turn.counts[slot] if stops else self.responses.most_of(row) - first
        return given, room

    def _places(self, size: PrefillSize, opened: Sequence[Opened], at: Sequence[int]) -> Any:
        """Where a call of prefill puts the prompts that lie `at` its places."""
        layout, count, most = self.layout, self.layout.shards * size.at_once, size.width // self.layout.page_length
        pages, window_pages = (np.zeros((count, number), np.int32) for number in (most, min(layout.reach, most)))
        states = np.zeros(count, np.int32)
        for place, one in zip(at, opened, strict=True):
            states[place] = one.state
            pages[place, most - len(one.pages) :] = one.pages
            window_pages[place, window_pages.shape[1] - len(one.window_pages) :] = one.window_pages
        if layout.stretches:
            return pages[:, 0]
        return pages, window_pages if layout.reach else None, states if layout.states else None

    def _record_prompts(self) -> None:
        """Reads the experts of prompts that were prefilled, while the devices decode."""
        for prompts, places, experts in self.unread:
            fed = np.array([self._fed(prompt) for prompt in prompts])
            self.responses.add_prompts(prompts, fed, fetch(experts)[places])
        self.unread = []

    def _fed(self, prompt: int) -> int:
        """Tokens of a prompt that prefill reads."""
        return len(self.prompts[prompt]) - 1 + self.layout.prefilled

    def _put(self, arrays: Any) -> Any:
        """Arrays of what rows have, on the shards of the batch."""
        return put(arrays, batch_sharding(self.calls.settings.mesh))

    def _program(self, shape: Shape) -> tuple[Any, Any]:
        return (self.layout, self.calls.limits, shape), lambda: self.calls.lower_decode(shape)

    def _reading(self, size: ReadSize) -> tuple[Any, Any]:
        return (self.layout, size), lambda: self.calls.lower_read(size)
