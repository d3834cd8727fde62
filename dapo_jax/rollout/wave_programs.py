"""Host: the compiled functions of a wave, lowered from shapes alone: no array exists yet."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from dapo_jax.models.layer_cache import LayerCache, layer_cache
from dapo_jax.models.transformer import Params
from dapo_jax.parallel.mesh import num_batch_shards
from dapo_jax.rollout.decoding import Wave, decode_chunk, empty_wave, prefill_part, resize_cache, wave_spec
from dapo_jax.rollout.engine_settings import (
    PREFILL_BYTES,
    SCORES,
    EngineSettings,
    cache_bytes,
    cache_dtype,
    prefill_bytes,
)
from dapo_jax.rollout.sampling import Sampling
from dapo_jax.rollout.shapes import LengthHistory, prompt_width, rows_in_memory, wave_size
from dapo_jax.rollout.wave_layout import WaveLayout


def lower_start(settings: EngineSettings, dtype: Any, layout: WaveLayout) -> jax.stages.Lowered:
    """Room for a wave; `dtype` of keys and values."""
    return empty_wave.lower(
        _rows(settings.mesh, (layout.num_rows,), _key_dtype()),
        _rows(settings.mesh, (layout.num_rows,), jnp.int32),
        _rows(settings.mesh, (layout.num_rows,), jnp.bool_),
        _rows(settings.mesh, (layout.num_prompts, layout.width), jnp.bool_),
        arch=settings.arch,
        dtype=dtype,
        window=settings.ladder[0],
    )


def lower_prefill(
    settings: EngineSettings, params: Params, sampling: Sampling, layout: WaveLayout
) -> jax.stages.Lowered:
    """The prefill of a part of the prompts of a wave."""
    return prefill_part.lower(
        params,
        start_shape(settings, cache_dtype(params), layout),
        _rows(settings.mesh, (layout.part_size, layout.width), jnp.int32),
        _rows(settings.mesh, (layout.part_size, layout.width), jnp.bool_),
        np.int32(0),
        sampling,
        arch=settings.arch,
        copies=layout.copies,
        eos_ids=settings.eos_ids,
        pad_id=settings.pad_id,
        choices=settings.choices,
    )


def lower_chunk(
    settings: EngineSettings, params: Params, sampling: Sampling, *, rows: int, prompts: int, width: int, window: int
) -> jax.stages.Lowered:
    """A chunk of decoding for the wave of `wave_shape`."""
    wave = wave_shape(settings, cache_dtype(params), rows=rows, prompts=prompts, width=width, window=window)
    return decode_chunk.lower(
        params,
        wave,
        sampling,
        arch=settings.arch,
        num_tokens=settings.tokens_per_chunk,
        eos_ids=settings.eos_ids,
        pad_id=settings.pad_id,
        choices=settings.choices,
    )


def lower_resize(
    settings: EngineSettings, cache: LayerCache, *, num_samples: int, rows: int | None, window: int
) -> jax.stages.Lowered:
    """Room for `window` tokens in one layer's cache, of which `rows` rows are kept; None = all."""
    chosen = None if rows is None else _rows(settings.mesh, (rows,), jnp.int32)
    return resize_cache.lower(cache, chosen, num_samples=num_samples, window=window)


def layout_of_waves(
    settings: EngineSettings,
    dtype: np.dtype,
    prompt_lengths: Sequence[int] | np.ndarray,
    num_samples: int,
    history: LengthHistory,
    free_bytes: float,
) -> WaveLayout:
    """The waves of a call: as few equal ones as max_num_seqs, or the memory if responses end as before, allows.

    Args:
        dtype: of keys and values.
        prompt_lengths: [Q] tokens, of all prompts of the call.
        free_bytes: on each device, of which keys and values may take `memory_share`.
    """
    shards, width = num_batch_shards(settings.mesh), prompt_width(max(prompt_lengths), settings.max_prompt_length)
    rows = settings.max_num_seqs or shards * rows_in_memory(
        free_bytes * settings.memory_share,
        cache_bytes=functools.partial(cache_bytes, settings, dtype),
        bytes_per_row=4.0 * SCORES * settings.arch.vocab_size / settings.mesh.shape["tensor"],
        width=width,
        chunk_length=settings.tokens_per_chunk,
        ladder=settings.ladder,
        alive=history.alive,
        lookahead=settings.lookahead,
    )
    size = wave_size(len(prompt_lengths), num_samples, max_rows=rows, shards=shards)
    at_once = max(int(PREFILL_BYTES / prefill_bytes(settings, width)), 1)
    return WaveLayout(size, num_samples, shards, width, at_once)


def start_shape(settings: EngineSettings, dtype: Any, layout: WaveLayout) -> Wave:
    """Shapes and shardings of a wave at its start."""
    shape = {"rows": layout.num_rows, "prompts": layout.num_prompts, "width": layout.width}
    return wave_shape(settings, dtype, **shape, window=settings.ladder[0])


def wave_shape(settings: EngineSettings, dtype: Any, *, rows: int, prompts: int, width: int, window: int) -> Wave:
    """Shapes and shardings of a wave: `rows` rows of `prompts` prompts of `width` tokens and `window` more."""
    arch = settings.arch

    def like(*shape: int, dtype: Any) -> Any:
        return _rows(settings.mesh, shape, dtype)

    make, sizes = functools.partial(_rows, settings.mesh, dtype=dtype), {"rows": rows, "prompts": prompts}
    caches = [layer_cache(make, kind, arch, **sizes, width=width, window=window) for kind in arch.layers]
    return Wave(
        tokens=like(rows, dtype=jnp.int32),
        finished=like(rows, dtype=jnp.bool_),
        keys=like(rows, dtype=_key_dtype()),
        begun=like(rows, dtype=jnp.int32),
        prompt_mask=like(prompts, width, dtype=jnp.bool_),
        caches=caches,
        length=like(dtype=jnp.int32),
    )


def _rows(mesh: Mesh, shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, wave_spec(len(shape))))


def _key_dtype() -> Any:
    return jax.eval_shape(jax.random.key, 0).dtype
