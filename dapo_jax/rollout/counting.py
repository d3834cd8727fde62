"""Host: what a queue tells devices to do, and devices that only count it, for the preflight."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dapo_jax.data.work import Work
from dapo_jax.models.architecture import Architecture
from dapo_jax.models.flops import token_flops
from dapo_jax.rollout.layout import Layout, PrefillSize, ReadSize, Shape
from dapo_jax.rollout.rows import Known


class Opened(NamedTuple):
    """A prompt that begins on a shard."""

    prompt: int
    shard: int
    pages: list[int]
    window_pages: list[int]  # of layers with a window, for its last pages
    state: int  # the place of its states


class Seen(NamedTuple):
    """The pages of layers with a window in a chunk of b slots, in arrays of the host or of the devices."""

    table: Any  # [b, R] int32, the last pages of each row, in the order of their tokens
    first: Any  # [b] int32, the number of the first of them among all pages of the row
    destinations: Any  # as in `decoding.Plan`


class RowStates(NamedTuple):
    """Where the states of rows are in layers with linear attention, in arrays of the host or of the devices."""

    reads: Any  # [b] int32, before the chunk: its prompt's for a row that begins, 0 without a row, else as ...
    writes: Any  # [b] int32, ... after it, its own; 0 = no row


class PagesSeen(NamedTuple):
    """Pages that rows see in a chunk, on all shards."""

    full: int  # in a layer without a window; of these ...
    prompts: int  # ... those of prompts that runs read, which are ...
    runs: int  # ... so many, if each run reads them once
    window: int  # in a layer with a window


class Turn(NamedTuple):
    """A chunk of decoding. Arrays are those of `decoding.Plan`, b slots on all shards."""

    shape: Shape
    rows: np.ndarray  # [b] response of each slot, -1 = none, or it waits
    sources: np.ndarray  # [b], also of rows that wait or return in their slots
    returns: np.ndarray  # [b] bool, the host knows the last token before the chunk, the slot does not
    sampled: np.ndarray  # [b]
    counts: np.ndarray  # [b] tokens of the chunk until the row stops for an answer that is known
    table: np.ndarray  # [b, M]
    destinations: np.ndarray  # [b], or [b, 2]
    states: RowStates | None
    windows: Seen | None
    runs: np.ndarray | None  # [b] int32
    pages: PagesSeen


class Counting:
    """Devices that count what a queue tells them to do, and do nothing else: a chunk is its number of tokens.

    Args:
        gathers: attention copies every place of the page table, as `attend_gathered` does.
    """

    def __init__(self, arch: Architecture, layout: Layout, *, gathers: bool = False) -> None:
        self.arch, self.layout, self.gathers = arch, layout, gathers
        self.computed = {"prefill": 0.0, "decode": 0.0}  # operations
        self.decodes: Counter[Shape] = Counter()  # chunks
        self.prefills: Counter[PrefillSize] = Counter()  # calls
        self.pages: Counter[Shape] = Counter()  # seen in these chunks, on all shards, in the mean layer
        self.prompt_pages: Counter[Shape] = Counter()  # of these those that runs read, in a layer without a window ...
        self.run_pages: Counter[Shape] = Counter()  # ... once for each run

    def prefill(self, size: PrefillSize, opened: Sequence[Opened]) -> tuple[Any, np.ndarray] | None:
        """Prefills prompts in a call of this shape; the first tokens that it draws, and their rows, -1 = none."""
        tokens = size.at_once * self.layout.shards * size.width
        self.computed["prefill"] += tokens * token_flops(self.arch).of_prefilled(size.width)
        self.prefills[size] += 1
        first = self.layout.prefilled
        return (first, np.concatenate([self.layout.rows(one.prompt) for one in opened])) if first else None

    def read(self, size: ReadSize, known: Sequence[Sequence[Known]]) -> None:
        """Reads tokens of an answer, of at most `size.rows` rows of each shard."""
        layout, flops, rows = self.layout, token_flops(self.arch), size.rows * self.layout.shards
        chunks = [one for of_shard in known for one in of_shard]
        pages = self._mean_pages(rows, sum(one.held for one in chunks), sum(len(one.seen) for one in chunks))
        keys = pages * layout.page_length
        self.computed["decode"] += size.tokens * (rows * flops.layers + keys * flops.pair)

    def decode(self, turn: Turn) -> Any:
        """Decodes a chunk and returns it."""
        self.computed["decode"] += self.layout.chunk * self._token_work(turn)
        self.decodes[turn.shape] += 1
        self.pages[turn.shape] += self._pages(turn)
        self.prompt_pages[turn.shape] += turn.pages.prompts
        self.run_pages[turn.shape] += turn.pages.runs
        return self.layout.chunk

    def take_back(self, turn: Turn, tokens: int) -> None:
        """The chunk has ended so many tokens early."""
        self.computed["decode"] -= tokens * self._token_work(turn)

    def _token_work(self, turn: Turn) -> float:
        """Operations of a token of each slot."""
        layout, flops = self.layout, token_flops(self.arch)
        slots = turn.shape.slots * layout.shards
        keys = self._pages(turn) * layout.page_length + slots * layout.chunk
        if layout.stretches:
            keys = slots * (layout.page_length + turn.shape.stretch)
        return slots * (flops.layers + flops.head) + keys * flops.pair

    def _pages(self, turn: Turn) -> Any:
        """Pages that are read in the mean layer."""
        return self._mean_pages(turn.shape.slots * self.layout.shards, turn.pages.full, turn.pages.window)

    def _mean_pages(self, rows: int, full: int, windowed: int) -> Any:
        """Pages of `rows` that are read in the mean layer: those that they see, or all that their tables have."""
        if self.gathers:
            full, windowed = rows * self.layout.row_pages, rows * self.layout.reach
        return token_flops(self.arch).mean(lambda window: full if window is None else windowed)

    def take_work(self, needed: Mapping[str, float] | None = None) -> dict[str, Work]:
        """Work by stage: what was computed since the last call, and what responses need of it."""
        computed, self.computed = self.computed, dict.fromkeys(self.computed, 0.0)
        return {stage: Work(operations, (needed or {}).get(stage, 0.0)) for stage, operations in computed.items()}
