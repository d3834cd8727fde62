"""Host: the way of a call of the slot engine from the first prompt to the last token, and its work.

The engine (slots.py) walks it with devices; `walk_slots` walks it with known lengths and without devices. Both take the
same decisions, those of slot_queue.py.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from dapo_jax.data.work import Work
from dapo_jax.models.architecture import Architecture
from dapo_jax.models.flops import token_flops
from dapo_jax.rollout.known_lengths import KnownLengths
from dapo_jax.rollout.needed_work import needed_work, work_of
from dapo_jax.rollout.slot_queue import Opened, PrefillSize, SlotLayout, SlotQueue, Turn, prefill_calls


class Devices(Protocol):
    """What works off the turns of a queue."""

    def prefill(self, size: PrefillSize, opened: Sequence[Opened]) -> None:
        """Prefills prompts in a call of this shape."""
        ...

    def decode(self, turn: Turn) -> Any:
        """Decodes a chunk and returns it."""
        ...


class Outcome(Protocol):
    """What the walk asks of the responses."""

    def add(self, chunk: Any, rows: np.ndarray, starts: np.ndarray) -> None:
        """Takes a chunk whose first token is number `starts` [B] of the responses `rows` [B]; -1 = none."""
        ...

    def alive(self, rows: np.ndarray) -> np.ndarray:
        """[B] bool, True for rows whose response is not known to have ended."""
        ...


@dataclass
class SlotWalk:
    """One generation.

    Args:
        lookahead: chunks dispatched before the result of one is read.
        gathers: attention copies every place of the page table, as `attend_gathered` does.
    """

    arch: Architecture
    queue: SlotQueue
    lookahead: int
    gathers: bool
    computed: dict[str, float] = field(default_factory=lambda: {"prefill": 0.0, "decode": 0.0})
    decodes: Counter[int] = field(default_factory=Counter)  # chunks by slots of a shard
    prefills: Counter[PrefillSize] = field(default_factory=Counter)  # calls
    pages: Counter[int] = field(
        default_factory=Counter
    )  # that rows read in these chunks, on all shards, in the mean layer
    pending: deque[tuple[Any, np.ndarray, np.ndarray]] = field(default_factory=deque)  # dispatched: chunk, rows, starts

    def advance(self, devices: Devices, outcome: Outcome) -> bool:
        """Dispatches a chunk, and takes the result of an earlier one; False once all responses have ended."""
        while len(self.pending) > self.lookahead:
            outcome.add(*self.pending.popleft())
        self.queue.release(outcome.alive)
        for size, opened in prefill_calls(self.queue.layout, self.queue.open()):
            devices.prefill(size, opened)
            self._count_prefill(size)
        turn = self.queue.turn()
        if turn is not None:
            self.pending.append((devices.decode(turn), turn.rows, turn.sampled))
            self._count_chunk(turn)
        elif self.pending:
            outcome.add(*self.pending.popleft())
        else:
            return False
        return True

    def take_computed(self) -> dict[str, float]:
        """Operations by stage since the last call."""
        computed, self.computed = self.computed, dict.fromkeys(self.computed, 0.0)
        return computed

    def _count_prefill(self, size: PrefillSize) -> None:
        flops, tokens = token_flops(self.arch), size.at_once * self.queue.layout.shards * size.width
        self.computed["prefill"] += tokens * flops.of_prefilled(size.width)
        self.prefills[size] += 1

    def _count_chunk(self, turn: Turn) -> None:
        layout, flops = self.queue.layout, token_flops(self.arch)
        slots = turn.slots * layout.shards
        full, window = turn.pages, turn.window_pages
        if self.gathers:
            full, window = slots * layout.row_pages, slots * layout.reach
        pages = flops.mean(lambda kind: full if kind is None else window)
        keys = (pages + slots) * layout.page_length  # a tail is as long as a page
        self.computed["decode"] += layout.page_length * (slots * (flops.layers + flops.head) + keys * flops.pair)
        self.decodes[turn.slots] += 1
        self.pages[turn.slots] += pages


def walk_slots(
    arch: Architecture,
    layout: SlotLayout,
    response_lengths: np.ndarray,
    prompt_lengths: np.ndarray,
    *,
    limit: int,
    lookahead: int,
) -> tuple[SlotWalk, dict[str, Work]]:
    """The walk of an engine whose responses turn out to have these lengths, and its work by stage.

    Args:
        response_lengths: [Q, G] tokens, from 1 to limit.
        prompt_lengths: [Q] tokens.
        limit: max_response_length.
    """
    queue, devices = SlotQueue(layout), _Counting(layout.page_length)
    queue.add(prompt_lengths, np.full(response_lengths.size, limit))
    walk, outcome = SlotWalk(arch, queue, lookahead, gathers=False), KnownLengths(response_lengths.reshape(-1), limit)
    while walk.advance(devices, outcome):
        pass
    return walk, work_of([walk.computed], needed_work(arch, prompt_lengths, response_lengths))


class _Counting:
    """Devices that do nothing; a chunk is its number of tokens."""

    def __init__(self, tokens_per_chunk: int) -> None:
        self.tokens_per_chunk = tokens_per_chunk

    def prefill(self, size: PrefillSize, opened: Sequence[Opened]) -> None:
        pass

    def decode(self, turn: Turn) -> int:
        return self.tokens_per_chunk
