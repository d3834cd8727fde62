"""Host: the rollout engine that decodes in waves whose rows become fewer and whose cache grows.

All rows of a wave have sampled equally many tokens. Between two chunks the host looks for responses that have ended:
they are handed on, and the survivors move to a smaller batch once they fit; a full cache is widened. wave_walk.py
decides when; here is what the devices do. None of this changes a token: every draw has an address (sampling.py).
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np

from dapo_jax.data.containers import Rollout
from dapo_jax.data.padding import pad_prompts
from dapo_jax.models.layer_cache import held
from dapo_jax.parallel.sharding import batch_sharding, fetch, put
from dapo_jax.rollout.decoding import Chunk, empty_wave, keep_rows, prefill_part, resize_cache
from dapo_jax.rollout.engine import Begun, Generation, GivenUp, OnFinished
from dapo_jax.rollout.engine_base import Block, Call, EngineBase
from dapo_jax.rollout.engine_settings import cache_dtype
from dapo_jax.rollout.round_walk import expected_shapes
from dapo_jax.rollout.sampling import keys_of
from dapo_jax.rollout.shapes import LengthHistory
from dapo_jax.rollout.wave_layout import WaveLayout
from dapo_jax.rollout.wave_programs import layout_of_waves, lower_chunk
from dapo_jax.rollout.wave_walk import WaveShape, WaveWalk


class WaveEngine(EngineBase):
    """A `RolloutEngine`, see `EngineBase`."""

    def _open(self, call: Call) -> Generation:
        return _Waves(self, call)

    def history(self, purpose: int) -> LengthHistory:
        """How long the responses of a purpose have been."""
        return self.learnt.history(purpose)


class _Waves:
    """A `Generation` that decodes prompts as soon as they are added."""

    def __init__(self, engine: WaveEngine, call: Call) -> None:
        self.engine, self.call = engine, call

    def add(
        self,
        prompts: Sequence[Sequence[int]],
        numbers: Sequence[int],
        *,
        begun: Begun | None = None,
        limits: np.ndarray | None = None,
        on_finished: OnFinished | None = None,
    ) -> Callable[[], Rollout]:
        engine, call, settings = self.engine, self.call, self.engine.settings
        block = engine.block(call, prompts, numbers, begun, limits, on_finished)
        history, memory = engine.history(call.purpose), 0.0 if settings.max_num_seqs else engine.learnt.free_memory()
        dtype, num_samples = cache_dtype(call.params), call.num_samples
        lengths = block.prompt_lengths
        if begun is not None:
            lengths = np.pad(lengths, (0, max(call.num_prompts - len(prompts), 0)), mode="edge")
        layout = layout_of_waves(settings, dtype, lengths, num_samples, history, memory)
        computed = []
        for first in range(0, len(prompts), layout.size):
            engine.check()
            end = min(first + layout.size, len(prompts))
            rows = slice(first * num_samples, end * num_samples)
            walk = WaveWalk(settings, layout, block.responses, first_row=rows.start, end_row=rows.stop)
            wave = _Wave(engine, call, block, layout, first, end)
            walk.run(wave)
            wave.record_prompts()
            computed.append(walk.computed)
            history.add(block.responses.drawn()[rows])
        rollout = engine.finished(block, computed)
        return lambda: rollout

    def close(self) -> GivenUp:
        return GivenUp()


class _Wave:
    """Prompts first..end on the devices; to the full size, copies of the last one, whose rows start finished."""

    def __init__(self, engine: WaveEngine, call: Call, block: Block, layout: WaveLayout, first: int, end: int) -> None:
        self.engine, self.settings, self.call, self.layout = engine, engine.settings, call, layout
        self.records, self.first, self.count = block.responses.records, first, end - first
        self.prefilled: list[tuple[np.ndarray, jax.Array]] = []  # prompts whose experts are to be recorded
        prompts, missing = block.prompts[first:end], layout.size - (end - first)
        self._prepare()
        self.tokens, self.mask = pad_prompts([*prompts, *[prompts[-1]] * missing], layout.width, self.settings.pad_id)
        rows = first * layout.num_samples + layout.rows()
        absent = rows >= end * layout.num_samples
        numbers, samples, begun = (
            np.where(absent, filler, of_rows[np.where(absent, 0, rows)]).astype(np.int32)
            for of_rows, filler in ((block.numbers, -1), (block.samples, 0), (block.responses.begun, 0))
        )
        self.wave = empty_wave(
            keys_of(self.settings.seed, call.purpose, self._put(numbers), self._put(samples)),
            self._put(begun),
            self._put(absent),
            self._put(self.mask[layout.prompts()]),
            arch=self.settings.arch,
            dtype=cache_dtype(call.params),
            window=self.settings.ladder[0],
        )

    def prefill(self, first: int) -> Chunk:
        settings, call, prompts = self.settings, self.call, self.layout.prefilled(first)
        self.wave, chunk, experts = prefill_part(
            call.params,
            self.wave,
            self._put(self.tokens[prompts]),
            self._put(self.mask[prompts]),
            np.int32(first),
            call.sampling,
            arch=settings.arch,
            copies=self.layout.copies,
            eos_ids=settings.eos_ids,
            pad_id=settings.pad_id,
            choices=settings.choices,
        )
        if self.records is not None and experts is not None:
            self.prefilled.append((prompts, experts))
        return chunk

    def resize(self, old: WaveShape, new: WaveShape, chosen: np.ndarray | None) -> None:
        rows, num_samples = None if chosen is None else self._put(chosen), old.rows // old.prompts
        caches, rest = self.wave.caches, dataclasses.replace(self.wave, caches=[])
        if rows is not None:
            rest = keep_rows(rest, rows, num_samples=num_samples)
        for layer, kind in enumerate(self.settings.arch.layers):  # only one layer at a time is in memory twice
            window = held(kind, new.window)
            if rows is not None or window != caches[layer].window:
                caches[layer] = resize_cache(caches[layer], rows, num_samples=num_samples, window=window)
        self.wave = dataclasses.replace(rest, caches=caches)

    def decode(self, shape: WaveShape, following: WaveShape) -> Chunk:
        self.engine.check()
        program = self.engine.programs.get(*self._lowering(shape))
        self.wave, chunk = program(self.call.params, self.wave, self.call.sampling)
        if following != shape:
            self.engine.programs.prepare(*self._lowering(following))
        self.record_prompts()
        return chunk

    def record_prompts(self) -> None:
        """Reads the experts of prompts, once the devices have more to do than to prefill them."""
        for prompts, experts in self.prefilled:
            assert self.records is not None
            real = prompts < self.count
            fed = self.mask[prompts[real]].sum(axis=1).tolist()
            self.records.add_prompts((self.first + prompts[real]).tolist(), fed, fetch(experts)[real])
        self.prefilled = []

    def _put(self, rows: np.ndarray) -> jax.Array:
        return put(rows, batch_sharding(self.settings.mesh))

    def _prepare(self) -> None:
        """Starts to compile the shapes that the wave is expected to go through."""
        history = self.engine.history(self.call.purpose)
        shapes = expected_shapes(self.settings, self.layout, history)
        for shape in shapes if history.known else shapes[:1]:
            self.engine.programs.prepare(*self._lowering(shape))

    def _lowering(self, shape: WaveShape) -> tuple[WaveShape, Callable[[], jax.stages.Lowered]]:
        params = self.engine.param_shapes(self.call.params)
        return shape, lambda: lower_chunk(self.settings, params, self.call.sampling, **shape._asdict())
