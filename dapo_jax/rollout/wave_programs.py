"""Host: the compiled functions of a wave, lowered from shapes alone: no array exists yet."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from dapo_jax.models.architecture import Architecture
from dapo_jax.models.transformer import LayerCache, Params
from dapo_jax.parallel.mesh import num_batch_shards
from dapo_jax.rollout.decoding import Wave, decode_chunk, empty_wave, prefill_part, resize_cache, wave_spec
from dapo_jax.rollout.sampling import Sampling
from dapo_jax.rollout.shapes import LengthHistory, prompt_width, rows_in_memory, wave_size, windows
from dapo_jax.rollout.wave_layout import WaveLayout

PREFILL_BYTES = 2.0**30  # of a device's memory for one call of prefill, besides keys and values
SCORES = 4  # float32 arrays of a row's scores of the vocabulary that a draw has in memory at once


@dataclass(frozen=True)
class WaveSettings:
    """What the wave engine needs to know before its first call."""

    arch: Architecture
    mesh: Mesh
    eos_ids: tuple[int, ...]  # each of them ends a response
    pad_id: int  # token where nothing was sampled; may equal an end-of-sequence token
    max_prompt_length: int  # tokens
    max_response_length: int  # tokens
    max_num_seqs: int  # rows decoded at once; 0 = as many as fit the memory
    memory_share: float  # of the free memory that keys and values may take where max_num_seqs is 0
    chunk_length: int  # tokens between two looks for responses that have ended
    smallest_rows: int  # per device, to which a wave shrinks
    lookahead: int  # chunks dispatched before the result of one is read
    seed: int

    @property
    def tokens_per_chunk(self) -> int:
        """Tokens of a chunk: at most what a response has after its first token."""
        return min(self.chunk_length, max(self.max_response_length - 1, 1))

    @property
    def ladder(self) -> list[int]:
        """The windows of the cache."""
        return windows(self.max_response_length, self.tokens_per_chunk)


def lower_start(settings: WaveSettings, dtype: Any, layout: WaveLayout) -> jax.stages.Lowered:
    """Room for a wave; `dtype` of keys and values."""
    return empty_wave.lower(
        _rows(settings.mesh, (layout.num_rows,), _key_dtype()),
        _rows(settings.mesh, (layout.num_rows,), jnp.bool_),
        _rows(settings.mesh, (layout.num_prompts, layout.width), jnp.bool_),
        arch=settings.arch,
        dtype=dtype,
        window=settings.ladder[0],
    )


def lower_prefill(settings: WaveSettings, params: Params, sampling: Sampling, layout: WaveLayout) -> jax.stages.Lowered:
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
    )


def lower_chunk(
    settings: WaveSettings, params: Params, sampling: Sampling, *, rows: int, prompts: int, width: int, window: int
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
    )


def lower_resize(
    settings: WaveSettings, cache: LayerCache, *, num_samples: int, rows: int | None, window: int
) -> jax.stages.Lowered:
    """Another window for one layer's cache, of which `rows` rows are kept; None = all."""
    chosen = None if rows is None else _rows(settings.mesh, (rows,), jnp.int32)
    return resize_cache.lower(cache, chosen, num_samples=num_samples, window=window)


def layout_of_waves(
    settings: WaveSettings,
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
        bytes_per_token=cache_bytes(settings, dtype),
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


def cache_bytes(settings: WaveSettings, dtype: np.dtype) -> float:
    """Of a token's keys and values on one device."""
    arch = settings.arch
    return 2 * arch.num_layers * arch.num_kv_heads * arch.head_dim / settings.mesh.shape["tensor"] * dtype.itemsize


def prefill_bytes(settings: WaveSettings, width: int) -> float:
    """About what the prefill of one prompt takes on a device: attention scores and activations of one layer."""
    arch, tensor = settings.arch, settings.mesh.shape["tensor"]
    divided = 3 * arch.num_heads * width + 4 * arch.intermediate_size
    return 4.0 * width * (divided / tensor + 8 * arch.hidden_size)


def start_shape(settings: WaveSettings, dtype: Any, layout: WaveLayout) -> Wave:
    """Shapes and shardings of a wave at its start."""
    shape = {"rows": layout.num_rows, "prompts": layout.num_prompts, "width": layout.width}
    return wave_shape(settings, dtype, **shape, window=settings.ladder[0])


def cache_dtype(params: Params) -> np.dtype:
    """Keys and values have the dtype of the matrices."""
    return params["layers"][0]["query"].dtype


def wave_shape(settings: WaveSettings, dtype: Any, *, rows: int, prompts: int, width: int, window: int) -> Wave:
    """Shapes and shardings of a wave: `rows` rows of `prompts` prompts of `width` tokens and `window` more."""
    arch = settings.arch

    def like(*shape: int, dtype: Any) -> Any:
        return _rows(settings.mesh, shape, dtype)

    heads, size = arch.num_kv_heads, arch.head_dim
    cache = LayerCache(
        prompt_key=like(prompts, heads, size, width, dtype=dtype),
        prompt_value=like(prompts, heads, width, size, dtype=dtype),
        key=like(rows, heads, size, window, dtype=dtype),
        value=like(rows, heads, window, size, dtype=dtype),
    )
    return Wave(
        tokens=like(rows, dtype=jnp.int32),
        finished=like(rows, dtype=jnp.bool_),
        keys=like(rows, dtype=_key_dtype()),
        prompt_mask=like(prompts, width, dtype=jnp.bool_),
        caches=[cache] * arch.num_layers,
        length=like(dtype=jnp.int32),
    )


def _rows(mesh: Mesh, shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, wave_spec(len(shape))))


def _key_dtype() -> Any:
    return jax.eval_shape(jax.random.key, 0).dtype
