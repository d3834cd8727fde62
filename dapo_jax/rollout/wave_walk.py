"""Host: the way of a wave from prefill to its last token: its shapes, its rows and its work.

The engine (waves.py) walks it with devices and learns lengths on the way; round_walk.py walks it with known lengths and
without devices. Both take the same decisions.
"""

from collections import deque
from typing import Any, NamedTuple, Protocol

import numpy as np

from dapo_jax.models.flops import token_flops
from dapo_jax.models.layer_cache import held
from dapo_jax.rollout.engine_settings import EngineSettings
from dapo_jax.rollout.shapes import rungs, window_of
from dapo_jax.rollout.wave_layout import WaveLayout


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

    def add(self, chunk: Any, rows: np.ndarray, starts: int) -> None:
        """Takes a chunk whose first token is number `starts` of the responses `rows`."""
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
        end_row: after the last one.
    """

    def __init__(
        self, settings: EngineSettings, layout: WaveLayout, outcome: Outcome, *, first_row: int, end_row: int
    ) -> None:
        self.settings, self.layout, self.outcome, self.ladder = settings, layout, outcome, settings.ladder
        self.rows = first_row + layout.rows()  # response of each row
        self.rows[self.rows >= end_row] = -1
        self.shape = WaveShape(layout.num_rows, layout.num_prompts, layout.width, self.ladder[0])
        self.sampled = 0  # tokens of each row that are sampled or being sampled
        self.computed = {"prefill": 0.0, "decode": 0.0}  # operations, as those of `needed_work`
        self._flops = token_flops(settings.arch)

    def run(self, devices: Devices) -> None:
        """Goes on until all responses have ended."""
        settings, outcome = self.settings, self.outcome
        pending: deque[tuple[Any, np.ndarray, int]] = deque()
        for first in self.layout.parts():
            width, prompts = self.shape.width, self.layout.part_size
            self.computed["prefill"] += prompts * width * self._flops.of_prefilled(width)
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
            self._count_chunk()
            self.sampled += settings.tokens_per_chunk

    def _count_chunk(self) -> None:
        shape, flops, layers = self.shape, self._flops, self.settings.arch.layers
        keys = sum(held(kind, shape.width) + held(kind, shape.window) for kind in layers) / len(layers)
        tokens = shape.rows * self.settings.tokens_per_chunk
        self.computed["decode"] += tokens * (flops.layers + flops.head + keys * flops.pair)

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
