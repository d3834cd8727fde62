"""Host: the compiled functions of a wave, lowered from shapes alone: no array exists yet."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from dapo_jax.data.containers import Prompts
from dapo_jax.models.architecture import Architecture
from dapo_jax.models.transformer import LayerCache, Params
from dapo_jax.parallel.mesh import num_batch_shards
from dapo_jax.rollout.decoding import Wave, decode_chunk, resize_cache, start_wave, wave_spec
from dapo_jax.rollout.sampling import Sampling
from dapo_jax.rollout.shapes import LengthHistory, prompt_width, rows_in_memory, windows


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


def lower_start(
    settings: WaveSettings, params: Params, sampling: Sampling, *, prompts: int, num_samples: int, width: int
) -> jax.stages.Lowered:
    """The prefill of `prompts` prompts of `width` tokens, each with `num_samples` rows."""
    batch = Prompts(
        tokens=_rows(settings.mesh, (prompts, width), jnp.int32),
        mask=_rows(settings.mesh, (prompts, width), jnp.bool_),
        numbers=_rows(settings.mesh, (prompts,), jnp.int32),
    )
    return start_wave.lower(
        params,
        batch,
        _rows(settings.mesh, (prompts * num_samples,), _key_dtype()),
        sampling,
        arch=settings.arch,
        window=settings.ladder[0],
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


def lower_growth(cache: LayerCache, *, num_samples: int, window: int) -> jax.stages.Lowered:
    """Widening one layer's cache while all rows stay."""
    return resize_cache.lower(cache, None, num_samples=num_samples, window=window)


def rows_at_once(
    settings: WaveSettings, dtype: np.dtype, history: LengthHistory, num_samples: int, free_bytes: float
) -> int:
    """Rows of a wave: max_num_seqs, or as many as fit the memory if responses end as they have done so far.

    Args:
        dtype: of keys and values.
        free_bytes: on each device, of which keys and values may take `memory_share`.
    """
    if settings.max_num_seqs:
        return settings.max_num_seqs
    free_bytes *= settings.memory_share
    arch, shards = settings.arch, num_batch_shards(settings.mesh)
    values = 2 * arch.num_layers * arch.num_kv_heads * arch.head_dim / settings.mesh.shape["tensor"]
    rows = rows_in_memory(
        free_bytes,
        bytes_per_token=values * dtype.itemsize,
        width=prompt_width(settings.max_prompt_length, settings.max_prompt_length),
        chunk_length=settings.tokens_per_chunk,
        ladder=settings.ladder,
        alive=history.alive,
        lookahead=settings.lookahead,
    )
    prompts = int(free_bytes / prefill_bytes(arch, settings.max_prompt_length))
    return max(min(rows, prompts * num_samples) * shards, num_samples)


def prefill_bytes(arch: Architecture, max_prompt_length: int) -> float:
    """About what the prefill of one prompt takes besides its cache: attention scores and activations of one layer."""
    width = prompt_width(max_prompt_length, max_prompt_length)
    scores = 3 * arch.num_heads * width
    return 4.0 * width * (scores + 4 * arch.intermediate_size + 8 * arch.hidden_size)


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
