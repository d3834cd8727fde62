"""Host: which row has which slot and which pages, decided between two chunks from lengths alone.

Prompts are given to shards in order, the next one to the shard with the fewest rows. Their rows wait there for a slot.
Too few pages: the youngest rows are given up and begin again later, with the same draws.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from dapo_jax.errors import InputError
from dapo_jax.rollout.window_pages import Seen, WindowPages

OPENED = 32  # rows of a shard whose prompts are prefilled between two chunks: more at once balance worse
WAITING = 4  # rows of a shard, at least, that may wait for a slot


class PrefillSize(NamedTuple):
    """The shape of a call of prefill."""

    width: int  # tokens of a prompt, with padding: whole pages
    at_once: int  # prompts of each shard


@dataclass(frozen=True)
class SlotLayout:
    """Sizes of the slots, the pages and the calls."""

    num_samples: int  # of a prompt
    shards: int
    slots: int  # of a shard
    few_slots: int  # of a shard, in the program for the last rows
    pages: int  # of a shard, with page 0, which takes what nobody reads
    page_length: int  # tokens of a page and of a chunk
    row_pages: int  # of a prompt and a response, at most
    prefills: tuple[PrefillSize, ...]  # the widest last
    window_pages: int = 0  # of a shard and a layer with a window, with page 0; 0 = no layer has one
    reach: int = 0  # pages that a window reaches behind a chunk

    @property
    def open_prompts(self) -> int:
        """Prompts of a shard that have pages, at most: one for each slot, and those that wait."""
        return self.slots + 2 * self.prefills[0].at_once

    def prompt_pages(self, length: int) -> int:
        """Pages of a prompt, whose last token is not prefilled."""
        return -(-(length - 1) // self.page_length)

    def own_pages(self, limit: int) -> int:
        """Pages of a response of `limit` tokens: what its last chunk adds is never read."""
        return max(-(-limit // self.page_length) - 1, 0)


class Opened(NamedTuple):
    """A prompt that begins on a shard."""

    prompt: int
    shard: int
    pages: list[int]
    window_pages: list[int]  # of layers with a window, for its last pages


class Turn(NamedTuple):
    """A chunk of decoding. Arrays are those of `slot_decoding.Plan`, b slots on all shards."""

    slots: int  # of a shard, in use
    rows: np.ndarray  # [b] response of each slot, -1 = none
    sources: np.ndarray  # [b]
    sampled: np.ndarray  # [b]
    table: np.ndarray  # [b, M]
    destinations: np.ndarray  # [b]
    pages: int  # that rows read, on all shards
    windows: Seen | None
    window_pages: int  # that they read in layers with a window


@dataclass
class _Row:
    row: int
    table: np.ndarray  # [M] pages of its prompt, then its own
    prompt_pages: int
    sampled: int = 0
    slot: int = -1  # in the last chunk
    pages: list[int] = field(default_factory=list)  # its own


class _Shard:
    def __init__(self, layout: SlotLayout) -> None:
        self.live: list[_Row] = []  # the oldest first
        self.waiting: deque[int] = deque()
        self.free = list(range(layout.pages - 1, 0, -1))
        self.windows = WindowPages(layout.window_pages, layout.reach)
        self.prompts: dict[int, list[int]] = {}  # pages of each
        self.left: dict[int, int] = {}  # rows of each prompt that have not ended

    @property
    def load(self) -> int:
        return len(self.live) + len(self.waiting)

    @property
    def prompt_pages(self) -> int:
        return sum(map(len, self.prompts.values()))


class SlotQueue:
    """Prompts that have been added, in order: prompt q has rows q * num_samples and following."""

    def __init__(self, layout: SlotLayout) -> None:
        self.layout = layout
        self.prompt_lengths: list[int] = []  # tokens
        self.limits: list[int] = []  # most tokens to draw for each row
        self.next_prompt = self.given_up = self._longest = 0
        # Few rows wait, so that shards end together; many, so that all shards prefill in the same calls.
        waiting = max(layout.prefills[0].at_once // 2, WAITING // layout.num_samples, 1)
        self._stock = layout.slots + layout.num_samples * waiting
        self.shards = [_Shard(layout) for _ in range(layout.shards)]

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
        assert max(self.prompt_lengths) - 1 <= layout.prefills[-1].width, "longer than what the layout was made for"
        needed = 1 + layout.prompt_pages(max(self.prompt_lengths)) + self._longest
        if layout.pages < needed:
            raise InputError(f"{layout.pages} pages of {layout.page_length} tokens a shard must be at least {needed}")
        return first_row

    def open(self) -> list[Opened]:
        """Prompts to prefill now, none while every shard has rows for its free slots."""
        opened: list[Opened] = []
        if all(shard.load >= self.layout.slots for shard in self.shards):
            return opened
        most = max(self.layout.prefills[0].at_once, OPENED // self.layout.num_samples, 1)
        counts = [0] * len(self.shards)
        while self.next_prompt < len(self.prompt_lengths):
            candidates = [i for i, count in enumerate(counts) if count < most and self._has_room(self.shards[i])]
            if not candidates:
                break
            chosen = min(candidates, key=lambda i: self.shards[i].load)
            opened.append(self._open(chosen))
            counts[chosen] += 1
        return opened

    def _has_room(self, shard: _Shard) -> bool:
        """Whether the oldest row can still end when one more prompt is open."""
        more = self.layout.prompt_pages(self.prompt_lengths[self.next_prompt])
        safe = shard.prompt_pages + more + self._longest < self.layout.pages
        if self.layout.reach and len(shard.prompts) >= self.layout.open_prompts:
            return False
        return shard.load < self._stock and more <= len(shard.free) and safe

    def _open(self, index: int) -> Opened:
        shard, prompt, samples = self.shards[index], self.next_prompt, self.layout.num_samples
        pages = [shard.free.pop() for _ in range(self.layout.prompt_pages(self.prompt_lengths[prompt]))]
        shard.prompts[prompt], shard.left[prompt] = pages, samples
        shard.waiting.extend(range(prompt * samples, (prompt + 1) * samples))
        self.next_prompt += 1
        return Opened(prompt, index, pages, shard.windows.open(prompt, len(pages)))

    def release(self, alive: Callable[[np.ndarray], np.ndarray]) -> None:
        """Frees the slots and pages of rows that have ended.

        Args:
            alive: rows [B] -> [B] bool, True for those whose response is not known to have ended.
        """
        for shard in self.shards:
            rows = np.array([*(row.row for row in shard.live), *shard.waiting], np.int64)
            known = alive(rows)
            live, kept = shard.live, len(shard.live)
            shard.waiting = deque(row for row, ok in zip(rows[kept:].tolist(), known[kept:], strict=True) if ok)
            shard.live = []
            for row, ok in zip(live, known[:kept], strict=True):
                if ok and row.sampled < self.limits[row.row]:
                    shard.live.append(row)
                else:
                    self._free(shard, row)
            gone = set(rows.tolist()) - {row.row for row in shard.live} - set(shard.waiting)
            for row in sorted(gone):
                self._ended(shard, row // self.layout.num_samples)

    def _ended(self, shard: _Shard, prompt: int) -> None:
        shard.left[prompt] -= 1
        if not shard.left[prompt]:
            shard.free.extend(shard.prompts.pop(prompt))
            shard.windows.close(prompt)
            del shard.left[prompt]

    def turn(self) -> Turn | None:
        """The next chunk; None without rows."""
        granted = [self._grant(shard) for shard in self.shards]
        most = max(len(shard.live) for shard in self.shards)
        if not most:
            return None
        slots = self.layout.few_slots if most <= self.layout.few_slots else self.layout.slots
        shape = self.layout.shards, slots
        rows, sources = np.full(shape, -1), np.full(shape, -1, np.int32)
        sampled, destinations = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        table, pages = np.zeros((*shape, self.layout.row_pages), np.int32), 0
        windows, window_pages = self._windows(slots, granted)
        for index, (shard, given) in enumerate(zip(self.shards, granted, strict=True)):
            for slot, row in enumerate(shard.live):
                place = index, slot
                rows[place], sources[place], sampled[place] = row.row, row.slot, row.sampled
                table[place], (destinations[place], _) = row.table, given.get(row.row, (0, 0))
                pages += self._held(row)
                self._advance(shard, row, slot, destinations[place])
        return Turn(
            slots,
            rows.reshape(-1),
            sources.reshape(-1),
            sampled.reshape(-1),
            table.reshape(-1, self.layout.row_pages),
            destinations.reshape(-1),
            pages,
            windows,
            window_pages,
        )

    def _windows(self, slots: int, granted: Sequence[dict[int, tuple[int, int]]]) -> tuple[Seen | None, int]:
        """The pages of layers with a window in the next chunk, and how many are read, if there are such layers."""
        layout, read = self.layout, 0
        if not layout.reach:
            return None, read
        table = np.zeros((layout.shards * slots, layout.reach), np.int32)
        first, destinations = np.zeros((2, len(table)), np.int32)
        for index, (shard, given) in enumerate(zip(self.shards, granted, strict=True)):
            for place, row in enumerate(shard.live, index * slots):
                seen = shard.windows.seen(row.row)
                table[place, : len(seen)], first[place] = seen, self._held(row) - len(seen)
                _, destinations[place] = given.get(row.row, (0, 0))
                read += len(seen)
        return Seen(table, first, destinations), read

    def _held(self, row: _Row) -> int:
        """Pages of a row before its next chunk."""
        return row.prompt_pages + row.sampled // self.layout.page_length

    def _advance(self, shard: _Shard, row: _Row, slot: int, destination: int) -> None:
        if destination:
            row.table[self._held(row)] = destination
            shard.windows.add(row.row)
        row.slot, row.sampled = slot, row.sampled + self.layout.page_length

    def _grant(self, shard: _Shard) -> dict[int, tuple[int, int]]:
        """Starts waiting rows, and gives pages to each row that continues after this chunk, oldest first."""
        granted: dict[int, tuple[int, int]] = {}
        young: list[_Row] = []
        live = deque(shard.live)
        shard.live = []
        while live:
            row = live.popleft()
            if self._goes_on(row.row, row.sampled):
                while not shard.free and live:
                    young.append(self._give_up(shard, live.pop()))
                if not shard.free:
                    young.append(self._give_up(shard, row))
                    break
                granted[row.row] = self._take(shard, row)
            shard.live.append(row)
        shard.waiting.extendleft(row.row for row in young)
        if not young:
            self._start(shard, granted)
        return granted

    def _start(self, shard: _Shard, granted: dict[int, tuple[int, int]]) -> None:
        """Rows begin while there are slots, and for each row that lives a page for its next chunk."""
        while shard.waiting and len(shard.live) < self.layout.slots:
            if shard.live and len(shard.free) <= len(shard.live):
                break
            row = self._begin(shard, shard.waiting.popleft())
            if self._goes_on(row.row, 0):
                granted[row.row] = self._take(shard, row)
            shard.live.append(row)

    def _begin(self, shard: _Shard, row: int) -> _Row:
        prompt, table = row // self.layout.num_samples, np.zeros(self.layout.row_pages, np.int32)
        pages = shard.prompts[prompt]
        table[: len(pages)] = pages
        shard.windows.begin(row, prompt)
        return _Row(row, table, len(pages))

    def _take(self, shard: _Shard, row: _Row) -> tuple[int, int]:
        row.pages.append(shard.free.pop())
        return row.pages[-1], shard.windows.take(row.row)

    def _free(self, shard: _Shard, row: _Row) -> None:
        shard.free.extend(row.pages)
        shard.windows.end(row.row)

    def _give_up(self, shard: _Shard, row: _Row) -> _Row:
        self._free(shard, row)
        self.given_up += 1
        return row

    def _goes_on(self, row: int, sampled: int) -> bool:
        """Whether a row with `sampled` tokens may draw more after its next chunk."""
        return sampled + self.layout.page_length < self.limits[row]


def prefill_calls(layout: SlotLayout, opened: Sequence[Opened]) -> Iterator[tuple[PrefillSize, list[Opened]]]:
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
