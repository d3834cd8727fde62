"""Host: a generation round of the wave engine whose lengths are known, without devices: what it calls and computes."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from dapo_jax.data.work import Work
from dapo_jax.rollout.engine_settings import EngineSettings
from dapo_jax.rollout.known_lengths import KnownLengths
from dapo_jax.rollout.needed_work import needed_work, work_of
from dapo_jax.rollout.shapes import LengthHistory
from dapo_jax.rollout.wave_layout import WaveLayout
from dapo_jax.rollout.wave_programs import layout_of_waves
from dapo_jax.rollout.wave_walk import WaveShape, WaveWalk


@dataclass(frozen=True)
class RoundWalk:
    """What the engine calls in one generation round, and the work of it."""

    layout: WaveLayout
    waves: int
    prefills: int  # parts of the prompts
    resizes: Counter[tuple[WaveShape, WaveShape]]  # from one shape to another
    decodes: Counter[WaveShape]  # chunks
    work: dict[str, Work]  # by stage


def walk_round(
    settings: EngineSettings,
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
    counted, computed = _Counting(settings.tokens_per_chunk), []
    outcome = KnownLengths(response_lengths.reshape(-1), settings.max_response_length)
    for first in range(0, num_prompts, layout.size):
        walk = WaveWalk(settings, layout, outcome, first_row=first * num_samples, end_row=response_lengths.size)
        walk.run(counted)
        computed.append(walk.computed)
    needed = needed_work(settings.arch, prompt_lengths, response_lengths)
    return RoundWalk(
        layout, len(computed), counted.prefills, counted.resizes, counted.decodes, work_of(computed, needed)
    )


def expected_shapes(settings: EngineSettings, layout: WaveLayout, history: LengthHistory) -> list[WaveShape]:
    """The shapes in which a wave is decoded if its responses end as those so far, in order."""
    counted, lengths = _Counting(settings.tokens_per_chunk), history.typical(layout.num_rows)
    outcome = KnownLengths(lengths, settings.max_response_length)
    WaveWalk(settings, layout, outcome, first_row=0, end_row=layout.num_rows).run(counted)
    return list(counted.decodes)


class _Counting:
    """Devices that only count; a chunk is its number of tokens."""

    def __init__(self, tokens_per_chunk: int) -> None:
        self.tokens_per_chunk, self.prefills = tokens_per_chunk, 0
        self.resizes: Counter[tuple[WaveShape, WaveShape]] = Counter()
        self.decodes: Counter[WaveShape] = Counter()

    def prefill(self, first: int) -> int:
        self.prefills += 1
        return 1

    def resize(self, old: WaveShape, new: WaveShape, chosen: np.ndarray | None) -> None:
        self.resizes[old, new] += 1

    def decode(self, shape: WaveShape, following: WaveShape) -> int:
        self.decodes[shape] += 1
        return self.tokens_per_chunk
