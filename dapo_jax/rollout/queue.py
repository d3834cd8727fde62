"""Host: a queue of prompts, and its loop: which row has which slot when, decided between two chunks from lengths alone.

Prompts are given to shards in order, the next one to the shard with the fewest rows, which wait there for a slot
(shards.py). The engine works a queue off with devices, the preflight with devices that only count (work.py).
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from dapo_jax.errors import InputError
from dapo_jax.rollout.layout import Layout, PrefillSize, Shape
from dapo_jax.rollout.shards import Granted, Row, Shard

WAITING = 4  # rows of a shard, at least, that may wait for a slot


class Opened(NamedTuple):
    """A prompt that begins on a shard."""

    prompt: int
    shard: int
    pages: list[int]
    window_pages: list[int]  # of layers with a window, for its last pages


class Seen(NamedTuple):
    """The pages of layers with a window in a chunk of b slots, in arrays of the host or of the devices."""

    table: Any  # [b, R] int32, the last pages of each row, in the order of their tokens
    first: Any  # [b] int32, the number of the first of them among all pages of the row
    destinations: Any  # [b] int32, the page that takes what this chunk adds; 0 = none


class Turn(NamedTuple):
    """A chunk of decoding. Arrays are those of `decoding.Plan`, b slots on all shards."""

    shape: Shape
    rows: np.ndarray  # [b] response of each slot, -1 = none
    sources: np.ndarray  # [b]
    sampled: np.ndarray  # [b]
    table: np.ndarray  # [b, M]
    destinations: np.ndarray  # [b]
    windows: Seen | None
    pages: int  # that rows read, on all shards
    window_pages: int  # that they read in layers with a window


class Devices(Protocol):
    """What works off the turns of a queue."""

    def prefill(self, size: PrefillSize, opened: Sequence[Opened]) -> tuple[Any, np.ndarray] | None:
        """Prefills prompts in a call of this shape; the first tokens that it draws, and their rows, -1 = none."""
        ...

    def decode(self, turn: Turn) -> Any:
        """Decodes a chunk and returns it."""
        ...


class Outcome(Protocol):
    """What the queue asks of the responses."""

    def add(self, chunk: Any, rows: np.ndarray, starts: np.ndarray) -> None:
        """Takes a chunk whose first token is number `starts` [B] of the responses `rows` [B]; -1 = none."""
        ...

    def alive(self, rows: np.ndarray) -> np.ndarray:
        """[B] bool, True for rows whose response is not known to have ended or to wait."""
        ...

    def waiting(self, rows: np.ndarray) -> np.ndarray:
        """[B] bool, True for rows that wait for tokens which the policy does not write."""
        ...


class Queue:
    """Prompts that have been added, in order: prompt q has rows q * num_samples and following.

    Args:
        lookahead: chunks dispatched before the result of one is read.
        returns: rows may wait for tokens and return.
    """

    def __init__(self, layout: Layout, *, lookahead: int = 0, returns: bool = False) -> None:
        self.layout, self.lookahead = layout, lookahead
        self.prompt_lengths: list[int] = []  # tokens
        self.limits: list[int] = []  # most tokens to draw for each row
        self.next_prompt = self._longest = self._stretch = 0
        # Few rows wait, so that shards end together; many, so that all shards prefill in the same calls.
        waiting = max(layout.prefills[0].at_once // 2, WAITING // layout.num_samples, 1)
        self._stock = layout.slots + layout.num_samples * waiting
        self.shards = [Shard(layout, self.limits, returns=returns) for _ in range(layout.shards)]
        self._dispatched: deque[tuple[Any, np.ndarray, np.ndarray]] = deque()  # chunk, rows, starts

    def add(self, prompt_lengths: Sequence[int] | np.ndarray, limits: np.ndarray) -> int:
        """Adds prompts; returns the first of their rows.

        Args:
            prompt_lengths: [Q] tokens.
            limits: [Q * num_samples] most tokens to draw for each row.

        Raises:
            InputError: a shard has too few pages for the longest prompt and response.
        """
        layout, first_row = self.layout, len(self.limits)
        self.prompt_lengths += [int(length) for length in prompt_lengths]
        self.limits += limits.tolist()
        self._longest = layout.own_pages(max(self.limits))
        longest = max(self.prompt_lengths)
        assert longest - 1 + layout.prefilled <= layout.prefills[-1].width, "longer than what the layout was made for"
        needed = 1 + layout.prompt_pages(longest) + self._longest
        if layout.pages < needed:
            raise InputError(f"{layout.pages} pages of {layout.page_length} tokens a shard must be at least {needed}")
        return first_row

    def step(self, devices: Devices, outcome: Outcome) -> bool:
        """Dispatches a chunk, and takes the result of an earlier one; False once no response goes on."""
        while len(self._dispatched) > self.lookahead:
            outcome.add(*self._dispatched.popleft())
        self.release(outcome)
        for size, opened in prefill_calls(self.layout, self.open()):
            first = devices.prefill(size, opened)
            if first is not None:
                outcome.add(*first, np.zeros(len(first[1]), np.int64))
                self.release(outcome)
        turn = self.turn()
        if turn is not None:
            self._dispatched.append((devices.decode(turn), turn.rows, turn.sampled))
        elif self._dispatched:
            outcome.add(*self._dispatched.popleft())
        else:
            return False
        return True

    def release(self, outcome: Outcome) -> None:
        """As `Shard.release`."""
        for shard in self.shards:
            shard.release(outcome.alive, outcome.waiting)

    def resume(self, row: int, known: int) -> None:
        """As `Shard.resume`; what was dispatched for the row after it had ended is not looked at."""
        for _, rows, _ in self._dispatched:
            rows[rows == row] = -1
        [shard] = [shard for shard in self.shards if row in shard.parked]
        shard.resume(row, known)

    def open(self) -> list[Opened]:
        """Prompts to prefill now, none while every shard has rows for its free slots."""
        opened: list[Opened] = []
        if all(shard.load >= self.layout.slots for shard in self.shards):
            return opened
        while self.next_prompt < len(self.prompt_lengths):
            pages = self.layout.prompt_pages(self.prompt_lengths[self.next_prompt])
            candidates = [
                index
                for index, shard in enumerate(self.shards)
                if shard.has_room(pages, most=self._stock, longest=self._longest)
            ]
            if not candidates:
                break
            chosen = min(candidates, key=lambda index: self.shards[index].load)
            opened.append(Opened(self.next_prompt, chosen, *self.shards[chosen].open(self.next_prompt, pages)))
            self.next_prompt += 1
        return opened

    def turn(self) -> Turn | None:
        """The next chunk; None without rows."""
        layout = self.layout
        granted = [shard.grant() for shard in self.shards]
        most = max(len(shard.live) for shard in self.shards)
        if not most:
            return None
        slots = min(size for size in layout.ladder if size >= most)
        used = slots * layout.shards
        rows, sources = np.full(used, -1), np.full(used, -1, np.int32)
        sampled, destinations, first, window_destinations = np.zeros((4, used), np.int32)
        table, seen = np.zeros((used, layout.row_pages), np.int32), np.zeros((used, layout.reach), np.int32)
        pages = window_pages = 0
        for index, (shard, given) in enumerate(zip(self.shards, granted, strict=True)):
            for slot, row in zip(_places(shard.live, slots), shard.live, strict=True):
                place, held = index * slots + slot, shard.held(row)
                rows[place], sources[place], sampled[place] = row.number, row.slot, row.sampled
                table[place], seen[place, : len(row.seen)] = row.table, row.seen
                first[place] = held - len(row.seen)
                pages, window_pages = pages + held, window_pages + len(row.seen)
                new = given.get(row.number, Granted())
                destinations[place], window_destinations[place] = new
                shard.advance(row, slot, new)
        longest = int(sampled.max()) - layout.prefilled + layout.chunk
        self._stretch = next((width for width in layout.stretches if width >= max(longest, self._stretch)), 0)
        windows = Seen(seen, first, window_destinations) if layout.reach else None
        shape = Shape(slots, self._stretch)
        return Turn(shape, rows, sources, sampled, table, destinations, windows, pages, window_pages)


def _places(live: Sequence[Row], slots: int) -> list[int]:
    """The slot of each row: the one that it has, if there are so many, else the first that is free."""
    kept = {row.slot for row in live if 0 <= row.slot < slots}
    free = iter([slot for slot in range(slots) if slot not in kept])
    return [row.slot if row.slot in kept else next(free) for row in live]


def prefill_calls(layout: Layout, opened: Sequence[Opened]) -> Iterator[tuple[PrefillSize, list[Opened]]]:
    """Opened prompts by calls of prefill, the longest first, so that each call is as narrow as its prompts allow.

    A prompt of one token has nothing to prefill.
    """
    waiting = [[one for one in opened if one.shard == shard and one.pages] for shard in range(layout.shards)]
    for prompts in waiting:
        prompts.sort(key=lambda one: -len(one.pages))
    while longest := max((len(prompts[0].pages) for prompts in waiting if prompts), default=0):
        size = next(size for size in layout.prefills if size.width >= longest * layout.page_length)
        yield size, [one for prompts in waiting for one in prompts[: size.at_once]]
        waiting = [prompts[size.at_once :] for prompts in waiting]
