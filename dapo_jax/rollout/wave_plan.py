"""Host: what the wave engine compiles and calls in one generation round, from shapes alone."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import jax
import numpy as np

from dapo_jax.data.work import Work
from dapo_jax.models.transformer import LayerCache, Params
from dapo_jax.parallel.mesh import num_batch_shards
from dapo_jax.rollout.sampling import Sampling
from dapo_jax.rollout.shapes import LengthHistory, rungs
from dapo_jax.rollout.wave_programs import (
    WaveSettings,
    cache_dtype,
    lower_chunk,
    lower_prefill,
    lower_resize,
    lower_start,
    wave_shape,
)
from dapo_jax.rollout.wave_walk import RoundWalk, WaveShape, walk_round

_SAMPLING = Sampling.create(1.0, 1.0, -1)  # its values are traced: any other lowers to the same program


@dataclass(frozen=True)
class RoundProgram:
    """A compiled function of the engine."""

    stage: str  # "prefill" or "decode"
    name: str
    calls: float  # per round
    lower: Callable[[], jax.stages.Lowered]  # call it under `jax.set_mesh`
    cache: list[LayerCache]  # shapes of the keys and values that the call takes and returns
    other_cache: list[LayerCache]  # shapes of those that are in memory meanwhile
    reads_weights: bool = True  # the decoding weights are an argument


@dataclass(frozen=True)
class RoundPlan:
    """The programs of one generation round."""

    programs: list[RoundProgram]
    waves: int
    rows: int  # of a wave, on all devices
    work: Mapping[str, Work]  # computed and needed, by stage


def plan_round(
    settings: WaveSettings,
    weights: Params,
    *,
    response_lengths: np.ndarray,
    prompt_lengths: np.ndarray,
    free_bytes: float,
    every_window: bool = True,
) -> RoundPlan:
    """The round of an engine that has sampled such responses before, with responses and prompts of these lengths.

    Args:
        weights: shapes and shardings of the decoding weights.
        response_lengths: [Q, G] tokens, at most max_response_length.
        prompt_lengths: [Q] tokens, at most max_prompt_length.
        free_bytes: on each device, before the first wave.
        every_window: list decoding in each window of the cache; otherwise, for each number of rows, in the first and
            the last one, which share the calls of the windows between them: all costs grow in proportion to the window.
    """
    history = LengthHistory(settings.max_response_length)
    history.add(response_lengths.reshape(-1))
    walk = walk_round(
        settings, cache_dtype(weights), response_lengths, prompt_lengths, history=history, free_bytes=free_bytes
    )
    return RoundPlan(
        list(_Programs(settings, weights, walk).all(every_window)), walk.waves, walk.layout.num_rows, walk.work
    )


class _Programs:
    def __init__(self, settings: WaveSettings, weights: Params, walk: RoundWalk) -> None:
        self.settings, self.weights, self.walk = settings, weights, walk
        self.shards = num_batch_shards(settings.mesh)

    def all(self, every_window: bool) -> Iterator[RoundProgram]:
        """In the order of a wave."""
        for width, calls in self.walk.prefills.items():
            yield self._start(width)
            yield self._prefill(width, calls)
        decoded = self.walk.decodes
        for shape, calls in (decoded if every_window else _ends(decoded)).items():
            yield self._decode(shape, calls)
        if decoded and all(shape.rows == self.walk.layout.num_rows for shape in decoded):
            yield from self._first_survivors(max(decoded, key=lambda shape: (shape.width, shape.window)))
        for (old, new), calls in self.walk.resizes.items():
            yield self._resize(old, new, calls)

    def _start(self, width: int) -> RoundProgram:
        layout = self.walk.layout
        return RoundProgram(
            "prefill",
            f"room for {layout.size // self.shards} prompts a shard, width {width}",
            self.walk.starts[width],
            lambda: lower_start(self.settings, cache_dtype(self.weights), layout, width=width),
            cache=self._cache(self._whole(width)),
            other_cache=[],
            reads_weights=False,
        )

    def _prefill(self, width: int, calls: float) -> RoundProgram:
        layout = self.walk.layout
        return RoundProgram(
            "prefill",
            f"prefill {layout.part_size // self.shards} prompts a shard, width {width}",
            calls,
            lambda: lower_prefill(self.settings, self.weights, _SAMPLING, layout, width=width),
            cache=self._cache(self._whole(width)),
            other_cache=[],
        )

    def _decode(self, shape: WaveShape, calls: float) -> RoundProgram:
        return RoundProgram(
            "decode",
            f"decode {shape.rows // self.shards} rows a shard, {self._words(shape)}",
            calls,
            lambda: lower_chunk(self.settings, self.weights, _SAMPLING, **shape._asdict()),
            cache=self._cache(shape),
            other_cache=[],
        )

    def _first_survivors(self, shape: WaveShape) -> Iterator[RoundProgram]:
        """Decoding of the largest batch of survivors, in which each row has its own copy of the prompt."""
        for height in rungs(shape.rows // self.shards, self.settings.smallest_rows)[1:2]:
            rows = height * self.shards
            yield self._decode(shape._replace(rows=rows, prompts=rows), 0)

    def _resize(self, old: WaveShape, new: WaveShape, calls: float) -> RoundProgram:
        """From one shape to another, layer by layer; the last one when all others are done."""
        narrow, *_ = self._cache(old)
        wide, *others = self._cache(new)
        rows = None if new.rows == old.rows else new.rows
        keep = "" if rows is None else f"keep {rows // self.shards} of "
        return RoundProgram(
            "decode",
            f"{keep}{old.rows // self.shards} rows a shard, {self._words(old)} to {new.window}",
            calls * self.settings.arch.num_layers,
            lambda: lower_resize(
                self.settings, narrow, num_samples=old.rows // old.prompts, rows=rows, window=new.window
            ),
            cache=[narrow, wide],
            other_cache=others,
            reads_weights=False,
        )

    def _words(self, shape: WaveShape) -> str:
        """Its window, and its width if prompts of a round have several."""
        return f"window {shape.window}" + (f", width {shape.width}" if len(self.walk.prefills) > 1 else "")

    def _whole(self, width: int) -> WaveShape:
        layout = self.walk.layout
        return WaveShape(layout.num_rows, layout.num_prompts, width, self.settings.ladder[0])

    def _cache(self, shape: WaveShape) -> list[LayerCache]:
        return wave_shape(self.settings, cache_dtype(self.weights), **shape._asdict()).caches


def _ends(decoded: Counter[WaveShape]) -> dict[WaveShape, float]:
    """For each number of rows, the first and the last window; those between give their calls to the nearer ones."""
    by_rows: defaultdict[WaveShape, dict[int, int]] = defaultdict(dict)
    for shape, count in decoded.items():
        by_rows[shape._replace(window=0)][shape.window] = count
    found: dict[WaveShape, float] = {}
    for shape, counts in by_rows.items():
        first, last = min(counts), max(counts)
        calls = dict.fromkeys((first, last), 0.0)
        for window, count in counts.items():
            share = (window - first) / max(last - first, 1)
            calls[first] += count * (1 - share)
            calls[last] += count * share
        found |= {shape._replace(window=window): count for window, count in calls.items()}
    return found
