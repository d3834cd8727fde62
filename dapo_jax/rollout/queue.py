"""Host: a queue of prompts, and its loop: which row has which slot when, decided between two chunks from lengths alone.

Prompts are given to shards in order, the next one to the shard with the fewest rows, which wait there for a slot
(shards.py). The engine works a queue off with devices, the preflight with devices that only count.
"""

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dapo_jax.errors import InputError
from dapo_jax.models.architecture import Architecture
from dapo_jax.models.flops import token_flops
from dapo_jax.rollout.counting import Counting, Opened, PagesSeen, RowStates, Seen, Turn
from dapo_jax.rollout.layout import Layout, PrefillSize, Shape
from dapo_jax.rollout.rows import Granted, Outcome, Row
from dapo_jax.rollout.shards import Shard

LEAST_STOCK = 4  # rows of a shard, at least, that may wait for a slot


class Queue:
    """Prompts that have been added, in order: prompt q has rows q * num_samples and following.

    Args:
        lookahead: chunks dispatched before the result of one is read; 0 where rows return, as each turn would else
            end a chunk later.
    """

    def __init__(self, layout: Layout, *, lookahead: int = 0) -> None:
        self.layout, self.lookahead = layout, 0 if layout.returns else lookahead
        self.prompt_lengths: list[int] = []  # tokens
        self.limits: list[int] = []  # most tokens to draw for each row
        self.next_prompt = self._longest = self._stretch = 0
        # Few rows wait, so that shards end together; many, so that all shards prefill in the same calls.
        waiting = layout.prefills[0].at_once // (1 if layout.ends_early else 2)
        waiting = max(waiting, LEAST_STOCK // layout.num_samples, 1)
        self._stock = layout.slots + layout.num_samples * waiting
        self.shards = [Shard(layout, self.limits) for _ in range(layout.shards)]
        self._dispatched: deque[tuple[Any, Turn]] = deque()  # chunks

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

    def step(self, devices: Counting, outcome: Outcome) -> bool:
        """Dispatches a chunk, and takes the result of an earlier one; False once no response goes on."""
        while len(self._dispatched) > self.lookahead:
            self._read(devices, outcome)
        self.release(outcome)
        for size, opened in prefill_calls(self.layout, self.open()):
            first = devices.prefill(size, opened)
            if first is not None:
                outcome.add(*first, np.zeros(len(first[1]), np.int64))
                self.release(outcome)
        granted = [shard.grant() for shard in self.shards]
        self._read_known(devices, outcome, granted)
        turn = self.turn(granted, outcome)
        if turn is not None:
            self._dispatched.append((devices.decode(turn), turn))
        elif self._dispatched:
            self._read(devices, outcome)
        else:
            return False
        return True

    def _read_known(self, devices: Counting, outcome: Outcome, granted: list[dict[int, Granted]]) -> None:
        """Rows read an answer, as many tokens at once as make a page, then as many as make a chunk.

        Which these are depends on the tokens alone. So it changes no key or value when a row is read again.
        """
        for sizes in self.layout.reads:
            while True:
                shards = zip(self.shards, granted, strict=True)
                known = [shard.read_known(given, outcome, sizes[0]) for shard, given in shards]
                if not (left := max(map(len, known))):
                    break
                while left > 0:  # in calls that are nearly full, but for the last
                    size = next((size for size in sizes if 4 * left >= 3 * size.rows), sizes[-1])
                    devices.read(size, [of_shard[: size.rows] for of_shard in known])
                    known, left = [of_shard[size.rows :] for of_shard in known], left - size.rows

    def _read(self, devices: Counting, outcome: Outcome) -> None:
        """Takes the result of the oldest chunk."""
        chunk, turn = self._dispatched.popleft()
        if early := self.layout.chunk - outcome.add(chunk, turn.rows, turn.sampled):
            devices.take_back(turn, early)
            for shard in self.shards:
                shard.take_back(early)

    def release(self, outcome: Outcome) -> None:
        """As `Shard.release`."""
        for shard in self.shards:
            shard.release(outcome.states)

    def resume(self, row: int, known: int) -> None:
        """As `Shard.resume`."""
        [shard] = [shard for shard in self.shards if row in shard.parked]
        shard.resume(row, known)

    def open(self) -> list[Opened]:
        """Prompts to prefill now, none while every shard has rows for its free slots."""
        opened: list[Opened] = []
        if all(shard.load >= self.layout.slots for shard in self.shards):
            return opened
        for prompt in range(self.next_prompt, len(self.prompt_lengths)):
            pages = self.layout.prompt_pages(self.prompt_lengths[prompt])
            fitting = [
                (shard.load, index)
                for index, shard in enumerate(self.shards)
                if shard.has_room(pages, most=self._stock, longest=self._longest)
            ]
            if not fitting:
                break
            _, chosen = min(fitting)
            opened.append(Opened(prompt, chosen, *self.shards[chosen].open(prompt, pages)))
            self.next_prompt += 1
        return opened

    def turn(self, granted: Sequence[Mapping[int, Granted]], outcome: Outcome) -> Turn | None:
        """The next chunk, with the pages that rows of each shard are granted; None without rows.

        Rows that read again what they have drawn stop where their turns have ended, so that their chunks are the same.
        """
        layout = self.layout
        if not any(shard.live for shard in self.shards):
            return None
        most = max(len(shard.live) + len(shard.holding) for shard in self.shards)
        slots = min(size for size in layout.ladder if size >= most)
        used = slots * layout.shards
        rows, sources, returns = np.full(used, -1), np.full(used, -1, np.int32), np.zeros(used, bool)
        sampled, first, counts = np.zeros((3, used), np.int32)
        destinations, window_destinations = np.zeros((2, used, 2), np.int32)
        states = RowStates(*np.zeros((2, used), np.int32)) if layout.states else None
        table, seen = np.zeros((used, layout.row_pages), np.int32), np.zeros((used, layout.reach), np.int32)
        runs = np.zeros(used, np.int32) if layout.together else None
        pages = window_pages = prompt_pages = run_pages = longest = 0
        for index, (shard, given) in enumerate(zip(self.shards, granted, strict=True)):
            live, holding, ends = shard.live, shard.holding, shard.turn_ends(outcome)
            places = _places([*live, *holding], slots)
            for slot, row in zip(places[len(live) :], holding, strict=True):
                place = index * slots + slot  # whatever is written there comes after what the row has drawn
                sources[place], sampled[place], row.slot = row.slot, row.sampled, slot
            if runs is not None:
                live, places = sorted(shard.live, key=lambda row: row.number), list(range(len(shard.live)))
                for begin, length in _runs(live, layout):
                    runs[index * slots + begin] = length
                    run_pages += live[begin].prompt_pages
                    prompt_pages += length * live[begin].prompt_pages
            for slot, row in zip(places[: len(live)], live, strict=True):
                place, held, longest = index * slots + slot, shard.held(row), max(longest, row.sampled)
                rows[place], sources[place], sampled[place] = row.number, row.slot, row.sampled
                returns[place], counts[place] = row.returns, ends.get(row.number, layout.chunk)
                if states is not None:
                    states.reads[place], states.writes[place] = row.state, row.own_state
                table[place], seen[place, : len(row.seen)] = row.table, row.seen
                first[place] = held - len(row.seen)
                pages, window_pages = pages + held, window_pages + len(row.seen)
                new = given.get(row.number, Granted())
                destinations[place], window_destinations[place] = shard.destinations(row, new)
                shard.advance(row, slot, new, int(counts[place]))
        self._stretch = max(self._stretch, longest - layout.prefilled + layout.chunk)
        longest = max(layout.stretches, default=0)
        self._stretch = next((width for width in layout.stretches if width >= self._stretch), longest)
        if not layout.go_on_anywhere:
            destinations, window_destinations = destinations[:, 0], window_destinations[:, 0]
        windows = Seen(seen, first, window_destinations) if layout.reach else None
        read = PagesSeen(pages, prompt_pages, run_pages, window_pages)
        given = rows, sources, returns, sampled, counts, table, destinations, states, windows, runs, read
        return Turn(Shape(slots, self._stretch), *given)


def _places(live: Sequence[Row], slots: int) -> list[int]:
    """The slot of each row: the one that it has, if there are so many, else the first that is free."""
    kept = {row.slot for row in live if 0 <= row.slot < slots}
    free = iter([slot for slot in range(slots) if slot not in kept])
    return [row.slot if row.slot in kept else next(free) for row in live]


def _runs(rows: Sequence[Row], layout: Layout) -> list[tuple[int, int]]:
    """The first of each run and how many it has, at most layout.together; rows are in the order of their prompts."""
    found, most = [], layout.together
    for count in Counter(row.number // layout.num_samples for row in rows).values():
        begin = sum(found[-1]) if found else 0
        found += [(begin + done, min(count - done, most)) for done in range(0, count, most)]
    return found


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


def needed_work(
    arch: Architecture, prompt_lengths: np.ndarray, response_lengths: np.ndarray, given: int = 0
) -> dict[str, float]:
    """Operations that responses [Q, G] to prompts [Q] of so many tokens need of any engine, by stage.

    prefill: each token of a prompt once. Its scores of the vocabulary are not counted.
    decode: each step that samples a token of a response; not the first token, which prefill predicts. The `given`
        tokens of them, which the policy has not written, are read once, and need no scores of the vocabulary.
    """
    flops = token_flops(arch)
    decode = flops.of_responses(prompt_lengths, response_lengths) - given * flops.head
    return {"prefill": flops.of_prompts(prompt_lengths), "decode": decode}
