"""Host: the way of a wave from prefill to its last token: its shapes, its rows and its work.

The engine walks it with devices and learns lengths on the way; `walk_round` walks it with known lengths and no devices.
Both take the same decisions.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from dapo_jax.data.work import Work
from dapo_jax.models.flops import token_flops
from dapo_jax.rollout.needed_work import needed_work
from dapo_jax.rollout.shapes import LengthHistory, prompt_width, rungs, window_of
from dapo_jax.rollout.wave_layout import WaveLayout
from dapo_jax.rollout.wave_programs import WaveSettings, layout_of_waves


class WaveShape(NamedTuple):
    """The shape of a wave on all devices."""

    rows: int
    prompts: int  # whose keys and values it caches; rows // prompts rows share one
    width: int  # tokens of a prompt
    window: int  # sampled tokens that a row has room for


class Devices(Protocol):
    """What works off a wave."""

    def prefill(self, first: int) -> Any:
        """Prefills the part of the layout that begins at `first`; returns the first token of its rows."""
        ...

    def resize(self, old: WaveShape, new: WaveShape, chosen: np.ndarray | None) -> None:
        """Gives the wave another shape; `chosen` are the rows to keep, by each shard's own index, None for all."""
        ...

    def decode(self, shape: WaveShape, following: WaveShape) -> Any:
        """Decodes a chunk and returns it; `following` is the shape of the next one if no row leaves."""
        ...


class Outcome(Protocol):
    """What the walk asks of the responses."""

    def add(self, chunk: Any, rows: np.ndarray, start: int) -> None:
        """Takes a chunk whose first token is number `start` of the responses `rows`."""
        ...

    def alive(self, rows: np.ndarray) -> np.ndarray:
        """[B] bool, True for rows whose response is not known to have ended; False for rows -1."""
        ...

    def longest(self, rows: np.ndarray) -> int:
        """Tokens after which all responses of `rows` have reached their limits."""
        ...


class WaveWalk:
    """One wave. Rows without a response, where prompts are missing to its size, are -1 and start finished.

    Args:
        first_row: of the responses to its prompts.
        end_row: of all responses.
        width: of its prompts.
    """

    def __init__(
        self, settings: WaveSettings, layout: WaveLayout, outcome: Outcome, *, first_row: int, end_row: int, width: int
    ) -> None:
        self.settings, self.layout, self.outcome, self.ladder = settings, layout, outcome, settings.ladder
        self.rows = first_row + layout.rows()  # response of each row
        self.rows[self.rows >= end_row] = -1
        self.shape = WaveShape(layout.num_rows, layout.num_prompts, width, self.ladder[0])
        self.sampled = 0  # tokens of each row that are sampled or being sampled
        self.computed = {"prefill": 0.0, "decode": 0.0}  # operations, as those of `needed_work`
        self._flops = token_flops(settings.arch)

    def run(self, devices: Devices) -> None:
        """Goes on until all responses have ended."""
        settings, outcome = self.settings, self.outcome
        pending: deque[tuple[Any, np.ndarray, int]] = deque()
        for first in self.layout.parts():
            self._count("prefill", self.layout.part_size * self.shape.width, self.shape.width, self._flops.layers)
            pending.append((devices.prefill(first), self.rows[self.layout.started(first)], 0))
        self.sampled = 1
        while True:
            longest = outcome.longest(self.rows)
            while len(pending) > settings.lookahead or (pending and self.sampled >= longest):
                outcome.add(*pending.popleft())
            alive = outcome.alive(self.rows)
            if self.sampled >= longest or not alive.any():
                break
            self._resize(alive, devices)
            pending.append((devices.decode(self.shape, self._after_next()), self.rows, self.sampled))
            shape, tokens = self.shape, settings.tokens_per_chunk
            self._count(
                "decode", shape.rows * tokens, shape.width + shape.window, self._flops.layers + self._flops.head
            )
            self.sampled += tokens

    def _count(self, stage: str, tokens: int, keys: int, flops: float) -> None:
        self.computed[stage] += tokens * (flops + keys * self._flops.pair)

    def _resize(self, alive: np.ndarray, devices: Devices) -> None:
        """Makes room for the next chunk, and leaves rows out if the survivors fit a smaller batch."""
        old, shards = self.shape, self.layout.shards
        here = alive.reshape(shards, -1)
        heights = rungs(here.shape[1], self.settings.smallest_rows)
        height = min(rung for rung in heights if rung >= here.sum(axis=1).max())
        new, chosen = old._replace(window=self._window(self.sampled)), None
        if height < here.shape[1]:
            chosen, self.rows = _survivors(self.rows.reshape(here.shape), here, height)
            new = new._replace(rows=height * shards, prompts=height * shards)
        if new != old:
            devices.resize(old, new, chosen)
            self.shape = new

    def _window(self, sampled: int) -> int:
        """The window for a chunk after `sampled` tokens."""
        return window_of(self.ladder, min(sampled - 1 + self.settings.tokens_per_chunk, self.ladder[-1]))

    def _after_next(self) -> WaveShape:
        return self.shape._replace(window=self._window(self.sampled + self.settings.tokens_per_chunk))


def _survivors(rows: np.ndarray, alive: np.ndarray, height: int) -> tuple[np.ndarray, np.ndarray]:
    """Each shard's own indices of `height` rows with all survivors [S, rows per shard], and what these rows hold.

    A shard with fewer survivors repeats its first row; the tokens of the copies belong to no response.
    """
    chosen, kept_rows = np.zeros((len(rows), height), np.int32), np.full((len(rows), height), -1)
    for shard, (own, survives) in enumerate(zip(rows, alive, strict=True)):
        kept = np.flatnonzero(survives)
        chosen[shard, : len(kept)], kept_rows[shard, : len(kept)] = kept, own[kept]
    return chosen.reshape(-1), kept_rows.reshape(-1)


@dataclass(frozen=True)
class RoundWalk:
    """What the engine calls in one generation round, and the work of it."""

    layout: WaveLayout
    waves: int
    starts: Counter[int] = field(default_factory=Counter)  # waves by width of their prompts
    prefills: Counter[int] = field(default_factory=Counter)  # calls by width of the prompts
    resizes: Counter[tuple[WaveShape, WaveShape]] = field(default_factory=Counter)  # from one shape to another
    decodes: Counter[WaveShape] = field(default_factory=Counter)  # chunks
    work: dict[str, Work] = field(default_factory=dict)  # by stage


def walk_round(
    settings: WaveSettings,
    dtype: Any,
    response_lengths: np.ndarray,
    prompt_lengths: np.ndarray,
    *,
    history: LengthHistory,
    free_bytes: float,
) -> RoundWalk:
    """The round of an engine whose responses turn out to have these lengths. No device is needed.

    Args:
        dtype: of keys and values.
        response_lengths: [Q, G] tokens, from 1 to max_response_length.
        prompt_lengths: [Q] tokens.
        history: what the engine knows before the round.
        free_bytes: on each device, before the first wave.
    """
    num_prompts, num_samples = response_lengths.shape
    layout = layout_of_waves(settings, dtype, prompt_lengths, num_samples, history, free_bytes)
    found = RoundWalk(layout, waves=-(-num_prompts // layout.size))
    computed: list[Mapping[str, float]] = []
    for first in range(0, num_prompts, layout.size):
        width = prompt_width(int(prompt_lengths[first : first + layout.size].max()), settings.max_prompt_length)
        outcome = _KnownLengths(response_lengths.reshape(-1), settings.max_response_length)
        walk = WaveWalk(
            settings, layout, outcome, first_row=first * num_samples, end_row=response_lengths.size, width=width
        )
        found.starts[width] += 1
        walk.run(_Counting(found, width, settings.tokens_per_chunk))
        computed.append(walk.computed)
    found.work.update(work_of(computed, needed_work(settings.arch, prompt_lengths, response_lengths)))
    return found


def work_of(computed: Sequence[Mapping[str, float]], needed: Mapping[str, float]) -> dict[str, Work]:
    """Work by stage, from what each wave has computed and all responses need."""
    return {stage: Work(sum(wave[stage] for wave in computed), needs) for stage, needs in needed.items()}


@dataclass(frozen=True)
class _Counting:
    """Devices that only count; a chunk is its number of tokens."""

    found: RoundWalk
    width: int
    tokens_per_chunk: int

    def prefill(self, first: int) -> int:
        self.found.prefills[self.width] += 1
        return 1

    def resize(self, old: WaveShape, new: WaveShape, chosen: np.ndarray | None) -> None:
        self.found.resizes[old, new] += 1

    def decode(self, shape: WaveShape, following: WaveShape) -> int:
        self.found.decodes[shape] += 1
        return self.tokens_per_chunk


class _KnownLengths:
    """Responses that end after a known number of tokens [B]."""

    def __init__(self, lengths: np.ndarray, limit: int) -> None:
        self.lengths, self.limit, self.seen = lengths, limit, np.zeros(len(lengths), np.int64)

    def add(self, chunk: int, rows: np.ndarray, start: int) -> None:
        self.seen[rows[rows >= 0]] = start + chunk

    def alive(self, rows: np.ndarray) -> np.ndarray:
        return (rows >= 0) & (self.seen < self.lengths)[rows]

    def longest(self, rows: np.ndarray) -> int:
        return self.limit
