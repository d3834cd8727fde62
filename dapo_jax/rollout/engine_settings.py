"""Host: what a rollout engine is told before its first call, and the sizes in memory that follow from it."""

from dataclasses import dataclass

import numpy as np
from jax.sharding import Mesh

from dapo_jax.models.architecture import Architecture, Choices
from dapo_jax.models.attention import queries_at_once
from dapo_jax.models.layer_cache import held
from dapo_jax.models.transformer import Params
from dapo_jax.rollout.shapes import windows

PREFILL_BYTES = 2.0**30  # of a device's memory for one call of prefill, besides keys and values
SCORES = 4  # float32 arrays of a row's scores of the vocabulary that a draw has in memory at once


@dataclass(frozen=True)
class EngineSettings:
    """What an engine needs to know before its first call."""

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
    least_page: int = 1  # tokens of a page of slots, at least
    choices: Choices | None = None  # how the experts of tokens are recorded; None = they are not

    @property
    def tokens_per_chunk(self) -> int:
        """Tokens of a chunk: at most what a response has after its first token."""
        return min(self.chunk_length, max(self.max_response_length - 1, 1))

    @property
    def ladder(self) -> list[int]:
        """The windows of the cache."""
        return windows(self.max_response_length, self.tokens_per_chunk)


def cache_dtype(params: Params) -> np.dtype:
    """Keys and values have the dtype of the matrices."""
    return params["layers"][0]["query"].dtype


def token_bytes(settings: EngineSettings, dtype: np.dtype) -> float:
    """Of a token's keys and values in one layer on one device."""
    arch = settings.arch
    return 2 * arch.num_kv_heads * arch.head_dim / settings.mesh.shape["tensor"] * dtype.itemsize


def cache_bytes(settings: EngineSettings, dtype: np.dtype, tokens: int) -> float:
    """Of the keys and values that a wave holds on one device of so many tokens of a prompt or a response."""
    return token_bytes(settings, dtype) * sum(held(kind, tokens) for kind in settings.arch.layers)


def prefill_bytes(settings: EngineSettings, width: int) -> float:
    """About what the prefill of one prompt takes on a device: attention scores and activations of one layer."""
    arch, tensor = settings.arch, settings.mesh.shape["tensor"]
    divided = 3 * arch.num_heads * queries_at_once(width) + 4 * arch.forward_size
    return 4.0 * width * (divided / tensor + 8 * arch.hidden_size)
