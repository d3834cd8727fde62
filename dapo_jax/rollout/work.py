"""Host: the operations that responses need of any engine, those that a queue takes, and queues without devices."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dapo_jax.data.work import Work
from dapo_jax.models.architecture import Architecture
from dapo_jax.models.flops import token_flops
from dapo_jax.rollout.layout import Layout, PrefillSize, Shape
from dapo_jax.rollout.queue import Opened, Queue, Turn


@dataclass
class Counted:
    """What the devices of a queue have been told to do.

    Args:
        gathers: attention copies every place of the page table, as `attend_gathered` does.
    """

    arch: Architecture
    layout: Layout
    gathers: bool = False
    computed: dict[str, float] = field(default_factory=lambda: {"prefill": 0.0, "decode": 0.0})  # operations
    decodes: Counter[Shape] = field(default_factory=Counter)  # chunks
    prefills: Counter[PrefillSize] = field(default_factory=Counter)  # calls
    pages: Counter[Shape] = field(default_factory=Counter)  # read in these chunks, on all shards, in the mean layer

    def add_prefill(self, size: PrefillSize) -> None:
        """A call of prefill."""
        flops, tokens = token_flops(self.arch), size.at_once * self.layout.shards * size.width
        self.computed["prefill"] += tokens * flops.of_prefilled(size.width)
        self.prefills[size] += 1

    def add_chunk(self, turn: Turn) -> None:
        """A chunk of decoding."""
        layout, flops = self.layout, token_flops(self.arch)
        slots = turn.shape.slots * layout.shards
        full, window = turn.pages, turn.window_pages
        if self.gathers:
            full, window = slots * layout.row_pages, slots * layout.reach
        pages = flops.mean(lambda kind: full if kind is None else window)
        keys = (pages + slots) * layout.page_length  # a tail is as long as a page
        if layout.stretches:
            keys = slots * (layout.page_length + turn.shape.stretch)
        self.computed["decode"] += layout.chunk * (slots * (flops.layers + flops.head) + keys * flops.pair)
        self.decodes[turn.shape] += 1
        self.pages[turn.shape] += pages

    def take_computed(self) -> dict[str, float]:
        """Operations by stage since the last call."""
        computed, self.computed = self.computed, dict.fromkeys(self.computed, 0.0)
        return computed


class Counting:
    """Devices that only count; a chunk is its number of tokens."""

    def __init__(self, arch: Architecture, layout: Layout, *, gathers: bool = False) -> None:
        self.layout, self.counted = layout, Counted(arch, layout, gathers)

    def prefill(self, size: PrefillSize, opened: Sequence[Opened]) -> tuple[int, np.ndarray] | None:
        """As `queue.Devices`."""
        self.counted.add_prefill(size)
        first = self.layout.prefilled
        return (first, np.concatenate([self.layout.rows(one.prompt) for one in opened])) if first else None

    def decode(self, turn: Turn) -> int:
        """As `queue.Devices`."""
        self.counted.add_chunk(turn)
        return self.layout.chunk


class KnownLengths:
    """Responses that end after a known number of tokens, [B]; a chunk is its number of tokens."""

    def __init__(self, lengths: np.ndarray) -> None:
        self.lengths, self.seen = lengths, np.zeros(len(lengths), np.int64)

    def add(self, chunk: int, rows: np.ndarray, starts: np.ndarray) -> None:
        """As `queue.Outcome`."""
        real = rows >= 0
        self.seen[rows[real]] = np.maximum(self.seen[rows[real]], starts[real] + chunk)

    def alive(self, rows: np.ndarray) -> np.ndarray:
        """As `queue.Outcome`."""
        return (rows >= 0) & (self.seen < self.lengths)[rows]

    def waiting(self, rows: np.ndarray) -> np.ndarray:
        """As `queue.Outcome`."""
        return np.zeros(len(rows), bool)


def walk_lengths(
    arch: Architecture,
    layout: Layout,
    response_lengths: np.ndarray,
    prompt_lengths: np.ndarray,
    *,
    limit: int,
    lookahead: int,
    gathers: bool = False,
) -> tuple[Counted, dict[str, Work]]:
    """What an engine does whose responses turn out to have these lengths, and its work by stage.

    Args:
        response_lengths: [Q, G] tokens, from 1 to limit.
        prompt_lengths: [Q] tokens.
        limit: max_response_length.
        gathers: of `Counted`.
    """
    queue, devices = Queue(layout, lookahead=lookahead), Counting(arch, layout, gathers=gathers)
    queue.add(prompt_lengths, np.full(response_lengths.size, limit))
    outcome = KnownLengths(response_lengths.reshape(-1))
    while queue.step(devices, outcome):
        pass
    return devices.counted, work_of(devices.counted.computed, needed_work(arch, prompt_lengths, response_lengths))


def needed_work(arch: Architecture, prompt_lengths: np.ndarray, response_lengths: np.ndarray) -> dict[str, float]:
    """Operations that responses need of any engine, by stage.

    prefill: each token of a prompt once. Its scores of the vocabulary are not counted.
    decode: each step that samples a token of a response; not the first token, which prefill predicts.

    Args:
        prompt_lengths: [Q] tokens.
        response_lengths: [Q, G] tokens.
    """
    flops = token_flops(arch)
    return {
        "prefill": flops.of_prompts(prompt_lengths),
        "decode": flops.of_responses(prompt_lengths, response_lengths),
    }


def work_of(computed: Mapping[str, float], needed: Mapping[str, float]) -> dict[str, Work]:
    """Work by stage, from what the engine has computed and all responses need."""
    return {stage: Work(computed[stage], needs) for stage, needs in needed.items()}
