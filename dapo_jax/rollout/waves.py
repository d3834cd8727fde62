"""Host: responses to any number of prompts, decoded in waves of equal shape."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh

from dapo_jax.containers import Prompts, Rollout
from dapo_jax.models.architecture import Architecture
from dapo_jax.models.transformer import Params
from dapo_jax.parallel.mesh import num_batch_shards
from dapo_jax.parallel.sharding import batch_sharding, fetch, put
from dapo_jax.rollout.decoding import Chunk, decode_chunk, start_wave
from dapo_jax.rollout.sampling import Sampling, row_keys


@dataclass(frozen=True)
class WaveSettings:
    """What does not change from call to call."""

    arch: Architecture
    mesh: Mesh
    eos_ids: tuple[int, ...]  # each of them ends a response
    pad_id: int  # stands where nothing was sampled; may equal an end-of-sequence token
    max_response_length: int  # tokens
    max_num_seqs: int  # rows decoded at once
    chunk_length: int  # tokens between two looks at what has finished
    seed: int


def generate(
    params: Params,
    prompts: Sequence[Sequence[int]],
    numbers: Sequence[int],
    *,
    num_samples: int,
    purpose: int,
    sampling: Sampling,
    settings: WaveSettings,
) -> Rollout:
    """`num_samples` responses to each prompt, as NumPy arrays; row b answers prompt b // num_samples.

    Args:
        params: decoding weights (from learner/actor.py), under `jax.set_mesh(settings.mesh)`.
        prompts: token ids of each prompt.
        numbers: address of each prompt's draws; with `purpose`, the sample and the position it fixes the noise.
    """
    size = wave_size(len(prompts), num_samples, settings)
    width = bucket(max(len(prompt) for prompt in prompts))
    waves = [
        _generate_wave(params, prompts[i : i + size], numbers[i : i + size], size, width, num_samples, purpose,
                       sampling, settings)
        for i in range(0, len(prompts), size)
    ]  # fmt: skip
    return jax.tree.map(lambda *parts: np.concatenate(parts), *waves)


def wave_size(num_prompts: int, num_samples: int, settings: WaveSettings) -> int:
    """Prompts per wave: as few equal waves as max_num_seqs allows, rounded up to the batch shards of the mesh."""
    shards = num_batch_shards(settings.mesh)
    most = max(settings.max_num_seqs // num_samples // shards, 1) * shards
    num_waves = -(-num_prompts // most)
    return min(-(-num_prompts // num_waves // shards) * shards, most)


def bucket(length: int) -> int:
    """The smallest of 4, 6, 8, 12, 16, 24, 32, ... that is at least `length`: few shapes, little padding."""
    size = 4
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 else size // 3 * 4
    return size


def pad_prompts(prompts: Sequence[Sequence[int]], width: int, pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Left-padded tokens [Q, width] int32 and mask [Q, width] bool."""
    tokens = np.full((len(prompts), width), pad_id, np.int32)
    mask = np.zeros((len(prompts), width), bool)
    for row, prompt in enumerate(prompts):
        tokens[row, width - len(prompt) :] = prompt
        mask[row, width - len(prompt) :] = True
    return tokens, mask


def _generate_wave(params, prompts, numbers, size, width, num_samples, purpose, sampling, settings) -> Rollout:
    """One wave; prompts missing to `size` are filled with copies of the last that start finished."""
    missing = size - len(prompts)
    tokens, mask = pad_prompts([*prompts, *[prompts[-1]] * missing], width, settings.pad_id)
    addresses = np.array([*numbers, *[-1] * missing], np.int32)
    batch = put(Prompts(tokens, mask, addresses), batch_sharding(settings.mesh))
    keys = row_keys(settings.seed, purpose, batch.numbers, num_samples)
    same = {"arch": settings.arch, "eos_ids": settings.eos_ids, "pad_id": settings.pad_id}
    chunk_length = min(settings.chunk_length, max(settings.max_response_length - 1, 1))
    num_chunks = -(-(settings.max_response_length - 1) // chunk_length)
    wave, chunk = start_wave(params, batch, keys, sampling, width=1 + num_chunks * chunk_length, **same)
    chunks = [chunk]
    while len(chunks) <= num_chunks and not np.all(fetch(chunks[-1].finished)):
        wave, chunk = decode_chunk(params, wave, sampling, num_tokens=chunk_length, **same)
        chunks.append(chunk)
    return _assemble(fetch(chunks), len(prompts) * num_samples, settings)


def _assemble(chunks: list[Chunk], num_rows: int, settings: WaveSettings) -> Rollout:
    """The chunks side by side without the rows of padding, cut or padded to the longest response allowed."""
    length = settings.max_response_length

    def join(name: str, padding: float) -> np.ndarray:
        joined = np.concatenate([getattr(chunk, name) for chunk in chunks], axis=1)[:num_rows, :length]
        return np.pad(joined, ((0, 0), (0, length - joined.shape[1])), constant_values=padding)

    responses, mask = join("tokens", settings.pad_id), join("mask", False)
    finished = np.any(np.isin(responses, settings.eos_ids) & mask, axis=1)
    return Rollout(responses, mask, join("logprobs", 0.0), finished)
