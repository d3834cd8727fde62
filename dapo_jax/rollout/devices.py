"""Host: what the devices do for the turns of a queue."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from dapo_jax.data.padding import pad_prompts
from dapo_jax.models.paged_attention import attend_gathered
from dapo_jax.parallel.sharding import batch_sharding, fetch, put
from dapo_jax.rollout.decoding import Chunk, FirstDraws, Plan, prefill
from dapo_jax.rollout.layout import PrefillSize, Shape
from dapo_jax.rollout.programs import Calls, Programs
from dapo_jax.rollout.queue import Opened, Turn
from dapo_jax.rollout.responses import JoinedResponses
from dapo_jax.rollout.sampling import TRAIN, Sampling
from dapo_jax.rollout.stretches import begun, resized
from dapo_jax.rollout.work import Counted


class QueueDevices:
    """The slots, and the keys and values of their rows; `queue.Devices`.

    Args:
        params: decoding weights.
        purpose: of the draws (sampling.py).
    """

    def __init__(
        self,
        calls: Calls,
        programs: Programs,
        params: Any,
        *,
        sampling: Sampling,
        purpose: int,
        responses: JoinedResponses,
    ) -> None:
        self.calls, self.programs, self.params, self.sampling, self.purpose = calls, programs, params, sampling, purpose
        self.settings, self.layout, self.responses = calls.settings, calls.layout, responses
        self.counted = Counted(self.settings.arch, self.layout, gathers=calls.attend is attend_gathered)
        self.held: Any = None  # while there are prompts
        self.shape = self.layout.first_shape
        self.prompts: list[Sequence[int]] = []
        # Of each row: tokens and last token of its prompt, number, sample, tokens begun. Row -1, the last, is no row.
        self.rows = np.array([[1], [self.settings.pad_id], [-1], [0], [0]], np.int32)
        # Calls of prefill whose prompts' experts are to be recorded: prompts, their places in the call, experts.
        self.prefilled: list[tuple[np.ndarray, np.ndarray, jax.Array]] = []
        for shape in [self.shape] if self.layout.stretches else [Shape(slots) for slots in self.layout.ladder]:
            programs.prepare(*self._program(shape))

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

    def free(self) -> None:
        """Frees the memory of what is held, of which nothing is needed."""
        self.held = None

    def prefill(self, size: PrefillSize, opened: Sequence[Opened]) -> tuple[Chunk, np.ndarray] | None:
        """As `queue.Devices`: prompts without their last token, unless its rows' first token is drawn."""
        layout, count = self.layout, self.layout.shards * size.at_once
        prompts: list[Sequence[int]] = [[self.settings.pad_id]] * count
        used, at = [0] * layout.shards, []
        for one in opened:
            at.append(one.shard * size.at_once + used[one.shard])
            used[one.shard] += 1
            prompts[at[-1]] = self.prompts[one.prompt][: self._fed(one.prompt)]
        self.counted.add_prefill(size)
        tokens, mask = pad_prompts(prompts, size.width, self.settings.pad_id)
        rows, first = np.full((count, layout.num_samples), -1), None
        for place, one in zip(at, opened, strict=True):
            rows[place] = layout.rows(one.prompt)
        rows = rows.reshape(-1)
        if layout.prefilled:
            first = FirstDraws(*map(self._put, self.rows[2:, rows]))
        self.held, chunk, experts = prefill(
            self.params,
            self.held,
            self._put(tokens),
            self._put(mask),
            self._places(size, opened, at),
            first,
            self.sampling,
            *self._address(),
            arch=self.settings.arch,
            eos_ids=self.settings.eos_ids,
            choices=self.settings.choices,
        )
        if experts is not None and self.purpose == TRAIN:
            self.prefilled.append((np.array([one.prompt for one in opened]), np.array(at), experts))
        return None if chunk is None else (chunk, rows)

    def decode(self, turn: Turn) -> Chunk:
        """As `queue.Devices`."""
        self.counted.add_chunk(turn)
        prompt_lengths, last_tokens, numbers, samples, started = self.rows[:, turn.rows]
        begins, sources = (turn.rows >= 0) & (turn.sources < 0), turn.sources
        for slot in np.flatnonzero(begins & (turn.sampled > 0)).tolist():
            last_tokens[slot] = self.responses.tokens_of(turn.rows[slot])[turn.sampled[slot] - 1]
        if self.layout.stretches:
            sources = self._with_stretches(turn, begins)
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
            windows=turn.windows,
            given=self._given(turn) if self.calls.returns else None,
        )
        program = self.programs.get(*self._program(turn.shape))
        plan = jax.tree.map(self._put, plan)
        self.held, chunk = program(self.params, self.held, plan, self.sampling, *self._address())
        self._record_prompts()
        return chunk

    def _with_stretches(self, turn: Turn, begins: np.ndarray) -> np.ndarray:
        """Gives what is held the shape of the turn, and rows that begin their prompts; returns where rows then are."""
        if turn.shape != self.shape:
            self.held = resized(self.held, self._put(turn.sources), stretch=turn.shape.stretch)
            self.shape = turn.shape
        if begins.any():
            self.held = begun(self.held, self._put(begins), self._put(turn.table[:, 0]))
        slots = np.tile(np.arange(turn.shape.slots, dtype=np.int32), self.layout.shards)
        return np.where(turn.sources < 0, turn.sources, slots)

    def _given(self, turn: Turn) -> np.ndarray:
        """[b, C] tokens of responses that are known already, -1 = none: a row that returns reads them."""
        given = np.full((len(turn.rows), self.layout.chunk), -1, np.int32)
        for slot in np.flatnonzero(turn.rows >= 0).tolist():
            first = int(turn.sampled[slot])
            known = self.responses.tokens_of(int(turn.rows[slot]))[first : first + self.layout.chunk]
            given[slot, : len(known)] = known
        return given

    def _places(self, size: PrefillSize, opened: Sequence[Opened], at: Sequence[int]) -> Any:
        """Where a call of prefill puts the prompts that lie `at` its places."""
        layout, count, most = self.layout, self.layout.shards * size.at_once, size.width // self.layout.page_length
        pages, window_pages = (np.zeros((count, number), np.int32) for number in (most, min(layout.reach, most)))
        for place, one in zip(at, opened, strict=True):
            pages[place, most - len(one.pages) :] = one.pages
            window_pages[place, window_pages.shape[1] - len(one.window_pages) :] = one.window_pages
        if layout.stretches:
            return self._put(pages[:, 0])
        return self._put(pages), self._put(window_pages) if layout.reach else None

    def _record_prompts(self) -> None:
        """Reads the experts of prompts that were prefilled, while the devices decode."""
        for prompts, places, experts in self.prefilled:
            fed = np.array([self._fed(prompt) for prompt in prompts])
            self.responses.add_prompts(prompts, fed, fetch(experts)[places])
        self.prefilled = []

    def _fed(self, prompt: int) -> int:
        """Tokens of a prompt that prefill reads."""
        return len(self.prompts[prompt]) - 1 + self.layout.prefilled

    def _put(self, rows: np.ndarray) -> jax.Array:
        return put(rows, batch_sharding(self.settings.mesh))

    def _address(self) -> tuple[np.int32, np.int32]:
        """The first parts of the addresses of all draws."""
        return np.int32(self.settings.seed), np.int32(self.purpose)

    def _program(self, shape: Shape) -> tuple[Any, Any]:
        return (self.layout, self.calls.returns, shape), lambda: self.calls.lower_decode(shape)
