"""Device: prefill of a wave of prompts and decoding in chunks, one compiled function each."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec

from dapo_jax.containers import Prompts
from dapo_jax.models import transformer
from dapo_jax.models.architecture import Architecture
from dapo_jax.models.transformer import LayerCache, Params
from dapo_jax.parallel.mesh import BATCH_AXES
from dapo_jax.parallel.sharding import constrain
from dapo_jax.rollout.sampling import Sampling, sample


@struct.dataclass
class Wave:
    """Rows decoded in lockstep: row b is sample b % n of prompt b // n, and all have sampled `length` tokens."""

    tokens: jax.Array  # [B] int32, the last sampled token
    finished: jax.Array  # [B] bool
    keys: jax.Array  # [B] addresses of the draws
    prompt_mask: jax.Array  # [Q, P] bool
    caches: list[LayerCache]
    length: jax.Array  # scalar int32


@struct.dataclass
class Chunk:
    """C sampled tokens of each row, whole on every device."""

    tokens: jax.Array  # [B, C] int32, pad_id where the mask is False
    mask: jax.Array  # [B, C] bool, False after the row's end-of-sequence token
    logprobs: jax.Array  # [B, C] float32
    finished: jax.Array  # [B] bool, after the chunk


@functools.partial(jax.jit, static_argnames=("arch", "width", "eos_ids", "pad_id"))
def start_wave(
    params: Params,
    prompts: Prompts,
    keys: jax.Array,
    sampling: Sampling,
    *,
    arch: Architecture,
    width: int,
    eos_ids: tuple[int, ...],
    pad_id: int,
) -> tuple[Wave, Chunk]:
    """Runs each prompt once, makes room for `width` tokens of each of its samples, and draws the first token.

    Args:
        prompts: Q prompts; those with a negative number are padding and start finished.
        keys: [B], B = Q * n.
    """
    num_samples = keys.shape[0] // prompts.tokens.shape[0]
    hidden, keys_and_values = transformer.prefill(params, prompts.tokens, prompts.mask, arch)
    empty = jnp.zeros((keys.shape[0], arch.num_kv_heads, width, arch.head_dim), keys_and_values[0][0].dtype)
    split = PartitionSpec(BATCH_AXES, "tensor")
    caches = [
        jax.tree.map(lambda x: constrain(x, split), LayerCache(prompt_key, prompt_value, empty, empty))
        for prompt_key, prompt_value in keys_and_values
    ]
    logits = jnp.repeat(transformer.logits(params, hidden), num_samples, axis=0)
    padding = jnp.repeat(prompts.numbers < 0, num_samples)
    tokens, logprobs = sample(logits, keys, jnp.int32(0), sampling)
    tokens, finished = _settle(tokens, padding, eos_ids, pad_id)
    wave = Wave(tokens, finished, keys, prompts.mask, caches, jnp.int32(1))
    return wave, _chunk(tokens[:, None], ~padding[:, None], logprobs[:, None], finished)


@functools.partial(
    jax.jit, static_argnames=("arch", "num_tokens", "eos_ids", "pad_id"), donate_argnames=("wave",)
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
) -> tuple[Wave, Chunk]:
    """Draws `num_tokens` more tokens for each row; rows that are finished draw padding."""
    num_samples = wave.tokens.shape[0] // wave.prompt_mask.shape[0]
    prompt_lengths = jnp.repeat(jnp.sum(wave.prompt_mask, axis=-1, dtype=jnp.int32), num_samples)

    def step(wave: Wave, _: None) -> tuple[Wave, Any]:
        index = wave.length - 1
        hidden, caches = transformer.decode(
            params, wave.tokens, prompt_lengths + index, wave.prompt_mask, wave.caches, index, arch
        )
        tokens, logprobs = sample(transformer.logits(params, hidden), wave.keys, wave.length, sampling)
        sampled = ~wave.finished
        tokens, finished = _settle(tokens, wave.finished, eos_ids, pad_id)
        new_wave = dataclasses.replace(wave, tokens=tokens, finished=finished, caches=caches, length=wave.length + 1)
        return new_wave, (tokens, sampled, logprobs)

    wave, outputs = jax.lax.scan(step, wave, length=num_tokens)
    tokens, mask, logprobs = (output.swapaxes(0, 1) for output in outputs)
    return wave, _chunk(tokens, mask, logprobs, wave.finished)


def _settle(tokens, finished, eos_ids, pad_id) -> tuple[jax.Array, jax.Array]:
    """Tokens with padding in the rows that were finished before, and which rows are finished now."""
    ended = jnp.isin(tokens, jnp.array(eos_ids, jnp.int32))
    return jnp.where(finished, pad_id, tokens), finished | ended


def _chunk(tokens, mask, logprobs, finished) -> Chunk:
    chunk = Chunk(tokens, mask, jnp.where(mask, logprobs, 0.0), finished)
    return jax.tree.map(lambda x: constrain(x, PartitionSpec()), chunk)
