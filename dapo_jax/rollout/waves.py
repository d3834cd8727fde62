"""Host: the rollout engine that decodes in waves whose rows become fewer and whose cache grows.

All rows of a wave have sampled equally many tokens. Between two chunks the host looks for responses that have ended:
they are handed on, and the survivors move to a smaller batch once they fit; a full cache is widened. wave_walk.py
decides when; here is what the devices do. None of this changes a token: every draw has an address (sampling.py).
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dapo_jax.data.containers import Rollout
from dapo_jax.data.padding import pad_prompts
from dapo_jax.models.transformer import Params
from dapo_jax.parallel.sharding import batch_sharding, put
from dapo_jax.rollout.decoding import Chunk, empty_wave, keep_rows, prefill_part, resize_cache
from dapo_jax.rollout.engine import OnFinished, StopRule
from dapo_jax.rollout.engine_settings import EngineSettings, cache_dtype
from dapo_jax.rollout.learnt_sizes import LearntSizes
from dapo_jax.rollout.needed_work import needed_work, work_of
from dapo_jax.rollout.programs import Programs
from dapo_jax.rollout.responses import Responses
from dapo_jax.rollout.round_walk import expected_shapes
from dapo_jax.rollout.sampling import Sampling, keys_of
from dapo_jax.rollout.shapes import LengthHistory
from dapo_jax.rollout.wave_layout import WaveLayout
from dapo_jax.rollout.wave_programs import layout_of_waves, lower_chunk
from dapo_jax.rollout.wave_walk import WaveShape, WaveWalk


class WaveEngine:
    """A `RolloutEngine`.

    Args:
        check: called before each chunk; may raise to end the sampling.
    """

    def __init__(self, settings: EngineSettings, check: Callable[[], None] = lambda: None) -> None:
        self.settings = settings
        self.check = check
        self.programs = Programs(settings.mesh)
        self.learnt = LearntSizes(settings)
        self._param_shapes: Params | None = None

    def generate(
        self,
        params: Params,
        prompts: Sequence[Sequence[int]],
        numbers: Sequence[int],
        *,
        num_samples: int,
        purpose: int,
        sampling: Sampling,
        limits: np.ndarray | None = None,
        stop: StopRule | None = None,
        on_finished: OnFinished | None = None,
    ) -> Rollout:
        """As `RolloutEngine.generate`, whose parameters say what to sample and how; `limits` is for measurements.

        Args:
            limits: [Q * num_samples], most tokens of each response; None = max_response_length for all.
        """
        longest, num_rows = self.settings.max_response_length, len(prompts) * num_samples
        responses = Responses(
            np.full(num_rows, longest) if limits is None else np.minimum(limits, longest),
            max_length=longest,
            eos_ids=self.settings.eos_ids,
            pad_id=self.settings.pad_id,
            stop=stop,
            on_finished=on_finished,
        )
        history, lengths = self.history(purpose), np.array([len(prompt) for prompt in prompts])
        layout = layout_of_waves(
            self.settings,
            cache_dtype(params),
            lengths,
            num_samples,
            history,
            self.learnt.memory_before_the_first_call(),
        )
        call, computed = _Call(params, sampling, purpose, layout, history), []
        for first in range(0, len(prompts), layout.size):
            self.check()
            end = min(first + layout.size, len(prompts))
            first_row, end_row = first * num_samples, end * num_samples
            walk = WaveWalk(self.settings, layout, responses, first_row=first_row, end_row=end_row)
            walk.run(_Wave(self, call, prompts[first:end], numbers[first:end]))
            computed.append(walk.computed)
            history.add(responses.lengths(first_row, end_row))
        rollout = responses.rollout()
        needed = needed_work(self.settings.arch, lengths, rollout.mask.sum(axis=1).reshape(-1, num_samples))
        return rollout.replace(work=work_of(computed, needed))  # pyright: ignore[reportAttributeAccessIssue]

    def history(self, purpose: int) -> LengthHistory:
        """How long the responses of a purpose have been."""
        return self.learnt.history(purpose)

    def state(self) -> dict[str, np.ndarray]:
        """What the size of the next wave depends on."""
        return self.learnt.state()

    def restore(self, arrays: Mapping[str, Any]) -> None:
        """The inverse of `state`."""
        self.learnt.restore(arrays)

    def param_shapes(self, params: Params) -> Params:
        """Shapes and shardings of the decoding weights, which are the same in every call."""
        shapes = self._param_shapes
        if shapes is None:
            shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params)
            self._param_shapes = shapes
        return shapes

    def close(self) -> None:
        """Stops compiling in the background."""
        self.programs.close()


@dataclasses.dataclass(frozen=True)
class _Call:
    """What the waves of one call of `generate` share."""

    params: Params
    sampling: Sampling
    purpose: int
    layout: WaveLayout
    history: LengthHistory


class _Wave:
    """A wave on the devices. Prompts missing to its size are copies of the last one; their rows start finished."""

    def __init__(
        self, engine: WaveEngine, call: _Call, prompts: Sequence[Sequence[int]], numbers: Sequence[int]
    ) -> None:
        self.engine, self.settings, self.call = engine, engine.settings, call
        layout, missing = call.layout, call.layout.size - len(prompts)
        self._prepare()
        self.tokens, self.mask = pad_prompts([*prompts, *[prompts[-1]] * missing], layout.width, self.settings.pad_id)
        prompt, sample = np.divmod(layout.rows(), layout.num_samples)
        addresses = np.array([*numbers, *[-1] * missing], np.int32)[prompt]
        keys = keys_of(self.settings.seed, call.purpose, self._put(addresses), self._put(sample.astype(np.int32)))
        self.wave = empty_wave(
            keys,
            self._put(addresses < 0),
            self._put(self.mask[layout.prompts()]),
            arch=self.settings.arch,
            dtype=cache_dtype(call.params),
            window=self.settings.ladder[0],
        )

    def prefill(self, first: int) -> Chunk:
        settings, call, prompts = self.settings, self.call, self.call.layout.prefilled(first)
        self.wave, chunk = prefill_part(
            call.params,
            self.wave,
            self._put(self.tokens[prompts]),
            self._put(self.mask[prompts]),
            np.int32(first),
            call.sampling,
            arch=settings.arch,
            copies=call.layout.copies,
            eos_ids=settings.eos_ids,
            pad_id=settings.pad_id,
        )
        return chunk

    def resize(self, old: WaveShape, new: WaveShape, chosen: np.ndarray | None) -> None:
        rows, num_samples = None if chosen is None else self._put(chosen), old.rows // old.prompts
        caches, rest = self.wave.caches, dataclasses.replace(self.wave, caches=[])
        if rows is not None:
            rest = keep_rows(rest, rows, num_samples=num_samples)
        for layer, cache in enumerate(caches):  # only one layer at a time is in memory twice
            caches[layer] = resize_cache(cache, rows, num_samples=num_samples, window=new.window)
        self.wave = dataclasses.replace(rest, caches=caches)

    def decode(self, shape: WaveShape, following: WaveShape) -> Chunk:
        self.engine.check()
        program = self.engine.programs.get(*self._lowering(shape))
        self.wave, chunk = program(self.call.params, self.wave, self.call.sampling)
        if following != shape:
            self.engine.programs.prepare(*self._lowering(following))
        return chunk

    def _put(self, rows: np.ndarray) -> jax.Array:
        return put(rows, batch_sharding(self.settings.mesh))

    def _prepare(self) -> None:
        """Starts to compile the shapes that the wave is expected to go through."""
        shapes = expected_shapes(self.settings, self.call.layout, self.call.history)
        for shape in shapes if self.call.history.known else shapes[:1]:
            self.engine.programs.prepare(*self._lowering(shape))

    def _lowering(self, shape: WaveShape) -> tuple[WaveShape, Callable[[], jax.stages.Lowered]]:
        params = self.engine.param_shapes(self.call.params)
        return shape, lambda: lower_chunk(self.settings, params, self.call.sampling, **shape._asdict())
