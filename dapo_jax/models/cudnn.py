"""Device: attention in bins by cuDNN.

JAX's public function takes no packed sequences, so this file calls the one behind it. That one asks whether the GPU of
this machine has the kernel, which is wrong where one compiles for another: the question is left out here, since
`fused_attention.unfit` has asked the devices of the mesh.

Sizes: N bins, M sequences of a bin.
"""

import dataclasses
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from dapo_jax.data.containers import Bins
from dapo_jax.data.padding import bucket
from dapo_jax.models.attention import PLAIN, Scores


def prepare(bins: Bins) -> Bins:
    """Host: adds the slots of each tree. An empty bin has one, since cuDNN takes no row without keys."""
    trees = max(int(bins.trees.max()), 1)
    trees = trees if trees < 4 else bucket(trees)
    found = (bins.trees[:, :, None] == np.arange(1, trees + 1)).sum(axis=1, dtype=np.int32)
    found[:, 0] = np.maximum(found[:, 0], 1)
    return dataclasses.replace(bins, lengths=found)


def attend(*arrays: Any, scores: Scores = PLAIN, sink: None = None) -> jax.Array:
    """Attention of query, key and value in bins that `prepare` has seen, as a kernel of `on_each_device`."""
    assert sink is None
    unasked = functools.partial(mock.patch.object, cudnn, "check_compute_capability", lambda capability: True)
    return traced_in(unasked, functools.partial(_attend, scores=scores))(*arrays)


def traced_in(context: Callable[[], AbstractContextManager[Any]], kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel` (query, key, value, maybe others, bins), traced inside a context in its backward pass too."""

    @jax.custom_vjp
    def attend(*arrays: Any) -> jax.Array:
        with context():
            return kernel(*arrays)

    def forward(*arrays: Any) -> tuple[jax.Array, Any]:
        *operands, bins = arrays
        with context():
            return jax.vjp(lambda *operands: kernel(*operands, bins), *operands)

    def backward(pull_back: Any, cotangent: jax.Array) -> tuple[Any, ...]:
        with context():
            return *pull_back(cotangent), None

    attend.defvjp(forward, backward)
    return attend


def _attend(query: jax.Array, key: jax.Array, value: jax.Array, bins: Bins, scores: Scores = PLAIN) -> jax.Array:
    """Padding is zeroed before and after: cuDNN leaves any value there."""
    assert scores.cap is None
    real = (bins.trees > 0)[:, :, None, None]
    query, key, value = (jnp.where(real, x, 0) for x in (query, key, value))
    return jnp.where(real, _kernel(query, key, value, bins.lengths, scores.window), 0).astype(jnp.float32)


def _kernel(query: jax.Array, key: jax.Array, value: jax.Array, lengths: jax.Array, window: int | None) -> Any:
    """cuDNN's attention, causal within sequences that begin one after the other.

    Args:
        lengths: [N, M], 0 where a bin has fewer than M sequences.
        window: as in Scores.
    """
    sizes: dict[str, Any] = {"q_seqlen": lengths[:, 0], "kv_seqlen": lengths[:, 0]}
    if lengths.shape[1] > 1:
        begins = jnp.where(lengths > 0, jnp.cumsum(lengths, axis=1) - lengths, -1)
        begins = jnp.pad(begins, ((0, 0), (0, 1)), constant_values=-1)
        lengths = jnp.where(lengths > 0, lengths, -1)
        sizes = {"q_seqlen": lengths, "kv_seqlen": lengths, "q_offsets": begins, "kv_offsets": begins}
    return cudnn.dot_product_attention(
        query,
        key,
        value,
        scale=query.shape[-1] ** -0.5,
        mask_type=cudnn.MaskType.PADDING_CAUSAL,
        sliding_window_length=window,
        **sizes,
    )
