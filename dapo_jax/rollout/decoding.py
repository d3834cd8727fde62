"""Device: prefill of a wave of prompts and decoding in chunks, one compiled function each."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec

from dapo_jax.models import transformer
from dapo_jax.models.architecture import Architecture, Choices
from dapo_jax.models.layer_cache import LayerCache, last_columns, layer_cache
from dapo_jax.models.transformer import Params
from dapo_jax.models.vocabulary_blocks import block_logits
from dapo_jax.parallel.mesh import BATCH_AXES
from dapo_jax.parallel.sharding import constrain
from dapo_jax.rollout.sampling import Sampling, sample


@struct.dataclass
class Wave:
    """B rows decoded in lockstep; `length` tokens of each are sampled here.

    The first B // Q rows answer the first prompt, the next the second, and so on. After the first `keep_rows` every
    row has its own copy of its prompt: Q = B.
    """

    tokens: jax.Array  # [B] int32, the last sampled token
    finished: jax.Array  # [B] bool
    keys: jax.Array  # [B] addresses of the draws
    begun: jax.Array  # [B] int32, tokens of the response that its prompt ends with
    prompt_mask: jax.Array  # [Q, P] bool
    caches: list[LayerCache]
    length: jax.Array  # scalar int32


@struct.dataclass
class Chunk:
    """C sampled tokens of each row, replicated on every device."""

    tokens: jax.Array  # [B, C] int32, pad_id where the mask is False
    mask: jax.Array  # [B, C] bool, False after the row's end-of-sequence token
    logprobs: jax.Array  # [B, C] float32
    # [B, C, l, k], of the tokens that were fed: each is one place before the token that was drawn from it
    experts: jax.Array | None = None


@functools.partial(jax.jit, static_argnames=("arch", "dtype", "window"))
def empty_wave(
    keys: jax.Array,
    begun: jax.Array,
    finished: jax.Array,
    prompt_mask: jax.Array,
    *,
    arch: Architecture,
    dtype: Any,
    window: int,
) -> Wave:
    """A wave with room for its prompts and `window` tokens of each row; nothing is prefilled yet.

    Args:
        keys: [B] addresses of the draws.
        begun: [B] int32, tokens of each response that its prompt ends with.
        finished: [B] bool, True on rows without a response.
        prompt_mask: [Q, P] bool.
        dtype: of keys and values.
    """
    (rows,), (prompts, width), make = keys.shape, prompt_mask.shape, functools.partial(jnp.zeros, dtype=dtype)
    sizes = {"rows": rows, "prompts": prompts, "width": width, "window": window}
    tokens, caches = jnp.zeros(rows, jnp.int32), [layer_cache(make, kind, arch, **sizes) for kind in arch.layers]
    return laid_out(Wave(tokens, finished, keys, begun, prompt_mask, caches, jnp.int32(1)))


@functools.partial(
    jax.jit, static_argnames=("arch", "copies", "eos_ids", "pad_id", "choices"), donate_argnames=("wave",)
)
def prefill_part(
    params: Params,
    wave: Wave,
    tokens: jax.Array,
    mask: jax.Array,
    first: jax.Array,
    sampling: Sampling,
    *,
    arch: Architecture,
    copies: int,
    eos_ids: tuple[int, ...],
    pad_id: int,
    choices: Choices | None = None,
) -> tuple[Wave, Chunk, jax.Array | None]:
    """Runs some prompts of an empty wave, each once, caches their keys and values, and draws their rows' first token.

    The third result is the experts [M, P, l, k] of the prompts' tokens, if they are recorded.

    Args:
        tokens, mask: [M, P] left-padded prompts; `copies` neighbouring shards all keep what they prefill together.
        first: scalar, where these prompts begin among those of each shard.
        choices: how experts are recorded; None = they are not.
    """
    samples = wave.tokens.shape[0] // wave.prompt_mask.shape[0]
    first_row, rows = first * samples, tokens.shape[0] * copies * samples
    hidden, keys_and_values, experts = transformer.prefill(params, tokens, mask, arch)
    caches = []
    for cache, (key, value) in zip(wave.caches, keys_and_values, strict=True):
        key, value = (_spread(x, copies) for x in last_columns(cache, key, value))
        caches.append(
            dataclasses.replace(
                cache,
                prompt_key=_put_part(cache.prompt_key, key, first),
                prompt_value=_put_part(cache.prompt_value, value, first),
            )
        )
    logits = jnp.repeat(block_logits(params, _spread(hidden, copies), arch), samples, axis=0)
    keys, begun, padding = (_part(x, first_row, rows) for x in (wave.keys, wave.begun, wave.finished))
    drawn, logprobs = sample(logits, keys, begun, sampling, eos_ids)
    drawn, finished = settle(drawn, padding, eos_ids, pad_id)
    wave = dataclasses.replace(
        wave,
        tokens=_put_part(wave.tokens, drawn, first_row),
        finished=_put_part(wave.finished, finished, first_row),
        caches=caches,
    )
    chunk = chunk_of(drawn[:, None], ~padding[:, None], logprobs[:, None])
    return laid_out(wave), chunk, everywhere(recorded(experts, choices))


@functools.partial(
    jax.jit, static_argnames=("arch", "num_tokens", "eos_ids", "pad_id", "choices"), donate_argnames=("wave",)
)
def decode_chunk(
    params: Params,
    wave: Wave,
    sampling: Sampling,
    *,
    arch: Architecture,
    num_tokens: int,
    eos_ids: tuple[int, ...],
    pad_id: int,
    choices: Choices | None = None,
) -> tuple[Wave, Chunk]:
    """Draws `num_tokens` more tokens for each row; finished rows draw padding."""
    num_samples = wave.tokens.shape[0] // wave.prompt_mask.shape[0]
    prompt_lengths = jnp.repeat(jnp.sum(wave.prompt_mask, axis=-1, dtype=jnp.int32), num_samples)

    def step(wave: Wave, __: None) -> tuple[Wave, Any]:
        index = wave.length - 1
        hidden, caches, experts = transformer.decode(
            params, wave.tokens, prompt_lengths + index, wave.prompt_mask, wave.caches, index, arch
        )
        logits = block_logits(params, hidden, arch)
        tokens, logprobs = sample(logits, wave.keys, wave.begun + wave.length, sampling, eos_ids)
        sampled = ~wave.finished
        tokens, finished = settle(tokens, wave.finished, eos_ids, pad_id)
        new_wave = dataclasses.replace(wave, tokens=tokens, finished=finished, caches=caches, length=wave.length + 1)
        return new_wave, (tokens, sampled, logprobs, recorded(experts, choices))

    wave, outputs = jax.lax.scan(step, wave, length=num_tokens)
    return laid_out(wave), chunk_of(*jax.tree.map(lambda output: output.swapaxes(0, 1), outputs))


def wave_spec(ndim: int) -> PartitionSpec:
    """The sharding of an array of a wave, by its number of dimensions."""
    if ndim == 4:
        return PartitionSpec(BATCH_AXES, "tensor")  # keys and values
    return PartitionSpec(BATCH_AXES) if ndim else PartitionSpec()


@functools.partial(jax.jit, static_argnames=("num_samples",))
def keep_rows(wave: Wave, rows: jax.Array, *, num_samples: int) -> Wave:
    """The wave without its caches, with these rows only.

    Args:
        rows: [B'], sharded like the rows of the wave; each device has indices into its own rows.
        num_samples: B // Q of the wave.
    """
    return dataclasses.replace(
        wave,
        tokens=_take(wave.tokens, rows),
        finished=_take(wave.finished, rows),
        keys=_take(wave.keys, rows),
        begun=_take(wave.begun, rows),
        prompt_mask=_take(wave.prompt_mask, rows // num_samples),
        caches=[],
    )


@functools.partial(jax.jit, static_argnames=("num_samples", "window"))
def resize_cache(cache: LayerCache, rows: jax.Array | None, *, num_samples: int, window: int) -> LayerCache:
    """One layer's cache with room for its `window` tokens and, if they are given, these rows only (see `keep_rows`)."""
    if rows is not None:
        cache = LayerCache(
            _take(cache.prompt_key, rows // num_samples),
            _take(cache.prompt_value, rows // num_samples),
            _take(cache.key, rows),
            _take(cache.value, rows),
        )
    more, none = (0, window - cache.window), (0, 0)
    key, value = jnp.pad(cache.key, (none, none, none, more)), jnp.pad(cache.value, (none, none, more, none))
    cache = dataclasses.replace(cache, key=key, value=value)
    return laid_out(cache)


def _take(x: jax.Array, rows: jax.Array) -> jax.Array:
    """Rows of `x` by the indices of each device into its own rows: nothing moves between devices."""
    spec = wave_spec(x.ndim)
    local = jax.shard_map(lambda x, rows: x[rows], in_specs=(spec, PartitionSpec(BATCH_AXES)), out_specs=spec)
    return local(x, rows)


def _part(x: jax.Array, first: jax.Array, size: int) -> jax.Array:
    """`size` rows of `x` in all, equally many of each device, from its own row `first` on."""
    spec = wave_spec(x.ndim)

    def local(x: jax.Array, first: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x, first, size // jax.lax.axis_size(BATCH_AXES))

    return jax.shard_map(local, in_specs=(spec, PartitionSpec()), out_specs=spec)(x, first)


def _put_part(x: jax.Array, part: jax.Array, first: jax.Array) -> jax.Array:
    """`x` with `part` written over each device's own rows from `first` on."""
    spec, write = wave_spec(x.ndim), jax.lax.dynamic_update_slice_in_dim
    local = jax.shard_map(
        lambda x, part, first: write(x, part, first, axis=0), in_specs=(spec, spec, PartitionSpec()), out_specs=spec
    )
    return local(x, part, first)


def _spread(x: jax.Array, copies: int) -> jax.Array:
    """Rows of `x` [M, ...] on every device of each block of `copies` neighbouring ones, [M * copies, ...]."""
    if copies == 1:
        return x
    spec = wave_spec(x.ndim)

    def local(x: jax.Array) -> jax.Array:
        devices = jax.lax.axis_size(BATCH_AXES)
        blocks = [list(range(first, first + copies)) for first in range(0, devices, copies)]
        return jax.lax.all_gather(x, BATCH_AXES, axis_index_groups=blocks, tiled=True)

    return jax.shard_map(local, in_specs=spec, out_specs=spec, check_vma=False)(x)


def laid_out(tree: Any) -> Any:
    return jax.tree.map(lambda x: constrain(x, wave_spec(x.ndim)), tree)


def settle(tokens, finished, eos_ids, pad_id) -> tuple[jax.Array, jax.Array]:
    """Tokens, with padding in rows that had finished before, and which rows are finished now."""
    ended = jnp.isin(tokens, jnp.array(eos_ids, jnp.int32))
    return jnp.where(finished, pad_id, tokens), finished | ended


def recorded(experts: jax.Array | None, choices: Choices | None) -> jax.Array | None:
    """The experts of tokens [..., l, k] as they are recorded; None if they are not."""
    return None if experts is None or choices is None else experts.astype(choices.dtype)


def chunk_of(tokens, mask, logprobs, experts=None) -> Chunk:
    return everywhere(Chunk(tokens, mask, jnp.where(mask, logprobs, 0.0), experts))


def everywhere(tree: Any) -> Any:
    """Arrays replicated on every device."""
    return jax.tree.map(lambda x: constrain(x, PartitionSpec()), tree)
