"""Host: what the wave engine compiles and calls in one generation round, from shapes alone."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import jax
import numpy as np

from dapo_jax.data.work import Work
from dapo_jax.models.transformer import LayerCache, Params
from dapo_jax.parallel.mesh import num_batch_shards
from dapo_jax.rollout.engine_settings import EngineSettings, cache_dtype
from dapo_jax.rollout.round_walk import RoundWalk, walk_round
from dapo_jax.rollout.sampling import Sampling
from dapo_jax.rollout.shapes import LengthHistory, rungs
from dapo_jax.rollout.wave_programs import (
    lower_chunk,
    lower_prefill,
    lower_resize,
    lower_start,
    start_shape,
    wave_shape,
)
from dapo_jax.rollout.wave_walk import WaveShape

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
    settings: EngineSettings,
    weights: Params,
    *,
    response_lengths: np.ndarray,
    prompt_lengths: np.ndarray,
    free_bytes: float,
) -> RoundPlan:
    """The round of an engine that has sampled such responses before, with responses and prompts of these lengths.

    Args:
        weights: shapes and shardings of the decoding weights.
        response_lengths: [Q, G] tokens, at most max_response_length.
        prompt_lengths: [Q] tokens, at most max_prompt_length.
        free_bytes: on each device, before the first wave.
    """
    history = LengthHistory(settings.max_response_length)
    history.add(response_lengths.reshape(-1))
    walk = walk_round(
        settings, cache_dtype(weights), response_lengths, prompt_lengths, history=history, free_bytes=free_bytes
    )
    return RoundPlan(list(_Programs(settings, weights, walk).all()), walk.waves, walk.layout.num_rows, walk.work)


class _Programs:
    def __init__(self, settings: EngineSettings, weights: Params, walk: RoundWalk) -> None:
        self.settings, self.weights, self.walk = settings, weights, walk
        self.shards = num_batch_shards(settings.mesh)

    def all(self) -> Iterator[RoundProgram]:
        """In the order of a wave."""
        yield self._start()
        yield self._prefill()
        decoded = self.walk.decodes
        for shape, calls in decoded.items():
            yield self._decode(shape, calls)
        if decoded and all(shape.rows == self.walk.layout.num_rows for shape in decoded):
            yield from self._first_survivors(max(decoded, key=lambda shape: shape.window))
        for (old, new), calls in self.walk.resizes.items():
            yield self._resize(old, new, calls)

    def _start(self) -> RoundProgram:
        layout = self.walk.layout
        return RoundProgram(
            "prefill",
            f"room for {layout.num_rows // self.shards} rows a shard, prompts of {layout.width}",
            self.walk.waves,
            lambda: lower_start(self.settings, cache_dtype(self.weights), layout),
            cache=start_shape(self.settings, cache_dtype(self.weights), layout).caches,
            other_cache=[],
            reads_weights=False,
        )

    def _prefill(self) -> RoundProgram:
        layout = self.walk.layout
        return RoundProgram(
            "prefill",
            f"prefill {layout.part_size // self.shards} prompts a shard, width {layout.width}",
            self.walk.prefills,
            lambda: lower_prefill(self.settings, self.weights, _SAMPLING, layout),
            cache=start_shape(self.settings, cache_dtype(self.weights), layout).caches,
            other_cache=[],
        )

    def _decode(self, shape: WaveShape, calls: float) -> RoundProgram:
        return RoundProgram(
            "decode",
            f"decode {shape.rows // self.shards} rows a shard, window {shape.window}",
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
            f"{keep}{old.rows // self.shards} rows a shard, window {old.window} to {new.window}",
            calls * self.settings.arch.num_layers,
            lambda: lower_resize(
                self.settings, narrow, num_samples=old.rows // old.prompts, rows=rows, window=new.window
            ),
            cache=[narrow, wide],
            other_cache=others,
            reads_weights=False,
        )

    def _cache(self, shape: WaveShape) -> list[LayerCache]:
        return wave_shape(self.settings, cache_dtype(self.weights), **shape._asdict()).caches
