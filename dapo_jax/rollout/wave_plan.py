"""Host: what the wave engine compiles and calls in one generation round, from shapes alone."""

from collections.abc import Iterator

import jax
import numpy as np

from dapo_jax.models.layer_cache import LayerCache, held
from dapo_jax.models.transformer import Params
from dapo_jax.parallel.mesh import num_batch_shards
from dapo_jax.rollout.engine_settings import EngineSettings, cache_dtype
from dapo_jax.rollout.round_plan import ANY_SAMPLING, RoundPlan, RoundProgram
from dapo_jax.rollout.round_walk import RoundWalk, walk_round
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


def plan_waves(
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
    rows = walk.layout.num_rows
    sizes = {"waves": walk.waves, "rows_of_a_wave": rows}
    return RoundPlan(list(_Programs(settings, weights, walk).all()), rows, sizes, walk.work)


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
            yield from self._resizes(old, new, calls)

    def _start(self) -> RoundProgram:
        layout = self.walk.layout
        return RoundProgram(
            "prefill",
            f"room for {layout.num_rows // self.shards} rows a shard, prompts of {layout.width}",
            self.walk.waves,
            lambda: lower_start(self.settings, cache_dtype(self.weights), layout),
            cache=start_shape(self.settings, cache_dtype(self.weights), layout).caches,
            reads_weights=False,
        )

    def _prefill(self) -> RoundProgram:
        layout = self.walk.layout
        return RoundProgram(
            "prefill",
            f"prefill {layout.part_size // self.shards} prompts a shard, width {layout.width}",
            self.walk.prefills,
            lambda: lower_prefill(self.settings, self.weights, ANY_SAMPLING, layout),
            cache=start_shape(self.settings, cache_dtype(self.weights), layout).caches,
        )

    def _decode(self, shape: WaveShape, calls: float) -> RoundProgram:
        """It reads the weights, and does something for each row and for each key that a row attends to."""
        rows, samples = shape.rows, shape.rows // shape.prompts
        return RoundProgram(
            "decode",
            f"decode {shape.rows // self.shards} rows a shard, window {shape.window}",
            calls,
            lambda: lower_chunk(self.settings, self.weights, ANY_SAMPLING, **shape._asdict()),
            cache=self._cache(shape),
            family=f"decode, {samples} rows a prompt",
            features=(1.0, rows, rows * self._held(shape.width), rows * self._held(shape.window)),
        )

    def _first_survivors(self, shape: WaveShape) -> Iterator[RoundProgram]:
        """Decoding of the largest batch of survivors, in which each row has its own copy of the prompt."""
        for height in rungs(shape.rows // self.shards, self.settings.smallest_rows)[1:2]:
            rows = height * self.shards
            yield self._decode(shape._replace(rows=rows, prompts=rows), 0)

    def _resizes(self, old: WaveShape, new: WaveShape, calls: float) -> Iterator[RoundProgram]:
        """From one shape to another, layer by layer; layers with a window have shapes of their own."""
        kinds = [kind.window for kind in self.settings.arch.layers]
        for window in dict.fromkeys(kinds):
            layers = [layer for layer, own in enumerate(kinds) if own == window]
            last = self._cache(old)[layers[-1]], self._cache(new)[layers[-1]]
            if new.rows != old.rows or last[0] != last[1]:
                yield self._resize(old, new, layers[-1], calls * len(layers))

    def _resize(self, old: WaveShape, new: WaveShape, layer: int, calls: float) -> RoundProgram:
        """Of one layer, when all others are done."""
        narrow, others = self._cache(old)[layer], self._cache(new)
        wide = others.pop(layer)
        rows = None if new.rows == old.rows else new.rows
        keep = "" if rows is None else f"keep {rows // self.shards} of "
        kept, target = _elements(narrow) * new.rows / old.rows, _elements(wide)
        return RoundProgram(
            "decode",
            f"{keep}{old.rows // self.shards} rows a shard, window {narrow.window} to {wide.window}",
            calls,
            lambda: lower_resize(
                self.settings, narrow, num_samples=old.rows // old.prompts, rows=rows, window=wide.window
            ),
            cache=[narrow, wide],
            other_cache=others,
            reads_weights=False,
            family=f"{'keep' if rows else ''} {'widen' if wide.window > narrow.window else ''}",
            features=(1.0, kept, target),
        )

    def _held(self, tokens: int) -> float:
        """Of so many tokens, those that a layer holds in the mean."""
        layers = self.settings.arch.layers
        return sum(held(kind, tokens) for kind in layers) / len(layers)

    def _cache(self, shape: WaveShape) -> list[LayerCache]:
        return wave_shape(self.settings, cache_dtype(self.weights), **shape._asdict()).caches


def _elements(cache: LayerCache) -> int:
    return sum(array.size for array in jax.tree.leaves(cache))
