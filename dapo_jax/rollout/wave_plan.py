"""Host: what the wave engine compiles and calls in one generation round, from shapes alone."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import jax
import numpy as np

from dapo_jax.models.transformer import LayerCache, Params
from dapo_jax.parallel.mesh import num_batch_shards
from dapo_jax.rollout.sampling import Sampling
from dapo_jax.rollout.shapes import LengthHistory, prompt_width, rungs, wave_size, window_of
from dapo_jax.rollout.wave_programs import (
    WaveSettings,
    cache_dtype,
    lower_chunk,
    lower_growth,
    lower_start,
    rows_at_once,
    wave_shape,
)

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


def plan_round(
    settings: WaveSettings,
    weights: Params,
    *,
    response_lengths: np.ndarray,
    prompt_lengths: np.ndarray,
    free_bytes: float,
    every_window: bool = True,
) -> RoundPlan:
    """The round of an engine that has seen no response yet, with responses and prompts of these lengths.

    Args:
        weights: shapes and shardings of the decoding weights.
        response_lengths: [Q, G] tokens, at most max_response_length.
        prompt_lengths: [Q] tokens, at most max_prompt_length.
        free_bytes: on each device, before the first wave.
        every_window: list decoding in each window of the cache; otherwise in the first and the last, which share the
            calls of the windows between them, since all costs grow in proportion to the window.
    """
    (num_prompts, num_samples), response_length = response_lengths.shape, int(response_lengths.max())
    shards, history = num_batch_shards(settings.mesh), LengthHistory(settings.max_response_length)
    most = rows_at_once(settings, cache_dtype(weights), history, num_samples, free_bytes)
    size = wave_size(num_prompts, num_samples, max_rows=most, shards=shards)
    waves, rows = -(-num_prompts // size), size * num_samples
    chunks = _chunks(settings, response_length)
    wave = _Wave(settings, weights, num_samples)
    programs = [wave.prefill(size, waves)]
    decoded = chunks if every_window else _ends(chunks)
    programs += [wave.decode(rows, size, window, count * waves) for window, count in decoded.items()]
    smaller = rungs(rows // shards, settings.smallest_rows)[1:2]
    if smaller and chunks:  # the largest batch of survivors, in which each row has its own copy of the prompt
        left = smaller[0] * shards
        programs.append(wave.decode(left, left, list(chunks)[-1], 0))
    programs += wave.widen(size, list(chunks), waves)
    return RoundPlan(programs, waves, rows)


class _Wave:
    """The programs of a wave whose prompts have the greatest width."""

    def __init__(self, settings: WaveSettings, weights: Params, num_samples: int) -> None:
        self.settings, self.weights, self.num_samples = settings, weights, num_samples
        self.shards = num_batch_shards(settings.mesh)
        self.width = prompt_width(settings.max_prompt_length, settings.max_prompt_length)

    def prefill(self, prompts: int, calls: float) -> RoundProgram:
        return RoundProgram(
            "prefill",
            f"prefill {prompts // self.shards} prompts a shard, width {self.width}",
            calls,
            lambda: lower_start(
                self.settings, self.weights, _SAMPLING, prompts=prompts, num_samples=self.num_samples, width=self.width
            ),
            cache=self._cache(prompts * self.num_samples, prompts, self.settings.ladder[0]),
            other_cache=[],
        )

    def decode(self, rows: int, prompts: int, window: int, calls: float) -> RoundProgram:
        shape = {"rows": rows, "prompts": prompts, "width": self.width, "window": window}
        return RoundProgram(
            "decode",
            f"decode {rows // self.shards} rows a shard, window {window}",
            calls,
            lambda: lower_chunk(self.settings, self.weights, _SAMPLING, **shape),
            cache=self._cache(rows, prompts, window),
            other_cache=[],
        )

    def widen(self, prompts: int, windows: list[int], waves: int) -> Iterator[RoundProgram]:
        """From each window to the next, layer by layer."""
        rows, layers = prompts * self.num_samples, self.settings.arch.num_layers
        for window, wider in zip(windows, windows[1:], strict=False):
            narrow, *_ = self._cache(rows, prompts, window)
            wide, *others = self._cache(rows, prompts, wider)  # the last layer is widened when the others are wide
            yield RoundProgram(
                "decode",
                f"widen the window {window} to {wider}",
                waves * layers,
                lambda narrow=narrow, wider=wider: lower_growth(narrow, num_samples=self.num_samples, window=wider),
                cache=[narrow, wide],
                other_cache=others,
                reads_weights=False,
            )

    def _cache(self, rows: int, prompts: int, window: int) -> list[LayerCache]:
        dtype = cache_dtype(self.weights)
        return wave_shape(self.settings, dtype, rows=rows, prompts=prompts, width=self.width, window=window).caches


def _chunks(settings: WaveSettings, response_length: int) -> Counter[int]:
    """Chunks by the window in which a wave of responses of `response_length` tokens decodes them, in order."""
    found: Counter[int] = Counter()
    sampled, length = 1, settings.tokens_per_chunk
    while sampled < response_length:
        found[window_of(settings.ladder, sampled - 1 + length)] += 1
        sampled += length
    return found


def _ends(chunks: Mapping[int, float]) -> dict[int, float]:
    """The first and the last window; those between give their calls to both, more to the nearer one."""
    ends = dict.fromkeys((min(chunks, default=0), max(chunks, default=0)), 0.0)
    first, last = min(ends), max(ends)
    for window, count in chunks.items():
        share = (window - first) / max(last - first, 1)
        ends[first] += count * (1 - share)
        ends[last] += count * share
    return ends if chunks else {}
