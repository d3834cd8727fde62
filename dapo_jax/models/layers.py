"""Device: one transformer layer, and the one way through all of them.

Sizes: B rows, T tokens, D hidden, H head size, L layers.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from dapo_jax.models.architecture import Architecture, Layer
from dapo_jax.models.lora import adapted
from dapo_jax.models.remat import rematerialized

Params = dict[str, Any]
KeyValue = tuple[jax.Array, jax.Array]


def run_layers(
    step: Callable[[Layer, Any, Params, Any], tuple[Any, Any]],
    hidden: Any,
    weights: Params | list[Params],
    arch: Architecture,
    *,
    caches: list[Any] | None = None,
    remat: str = "none",
) -> tuple[Any, Any]:
    """Takes `hidden` through the L layers, by `step` (kind, hidden, weights, cache) -> (hidden, cache).

    Stacked weights of one kind are scanned, unless there are caches; else the layers are unrolled.

    Args:
        hidden: what one layer hands to the next, a pytree.
        weights: stacked in one pytree, or a list of L pytrees.
        caches: what `step` gets for each layer; None: it gets None.
        remat: what is saved for the backward pass, a name of models/remat.py's POLICIES.

    Returns:
        `hidden` after the last layer, and the caches that `step` returned: stacked after a scan, else a list.
    """
    steps = {kind: rematerialized(functools.partial(step, kind), remat) for kind in arch.layers}
    if not isinstance(weights, list):
        if len(steps) == 1 and caches is None:
            scanned = steps[arch.layers[0]]
            return jax.lax.scan(lambda hidden, layer: scanned(hidden, layer, None), hidden, weights)
        weights = unstacked(weights, arch.num_layers)
    results = []
    for kind, layer, cache in zip(arch.layers, weights, caches or [None] * arch.num_layers, strict=True):
        hidden, result = steps[kind](hidden, layer, cache)
        results.append(result)
    return hidden, results


def unstacked(tree: Any, num_layers: int) -> list[Any]:
    """The part of each layer of arrays with the layer as their first dimension."""
    return [jax.tree.map(lambda x, i=i: x[i], tree) for i in range(num_layers)]


def block(
    kind: Layer,
    x: jax.Array,
    layer: Params,
    rotation: KeyValue,
    attend: Callable[..., tuple[jax.Array, Any]],
    arch: Architecture,
) -> tuple[jax.Array, Any]:
    """One transformer layer, [B, T, D] -> [B, T, D], and the cache that `attend` returns.

    Args:
        layer: the layer's weights.
        rotation: cosine and sine from `rotary`.
        attend: (query [B, T, N, H], key, value [B, T, K, H]) -> (what is attended [B, T, N, H], cache).
    """
    normed = rms_norm(x, layer["attention_norm"], arch.rms_norm_eps)
    query = adapted("btd,dnh->btnh", normed, layer, "query")
    key = adapted("btd,dkh->btkh", normed, layer, "key")
    value = adapted("btd,dkh->btkh", normed, layer, "value")
    if arch.qkv_bias:
        query, key, value = query + layer["query_bias"], key + layer["key_bias"], value + layer["value_bias"]
    if arch.qk_norm:
        query = rms_norm(query, layer["query_norm"], arch.rms_norm_eps)
        key = rms_norm(key, layer["key_norm"], arch.rms_norm_eps)
    dtype = layer["query"].dtype

    def positioned(x: jax.Array) -> jax.Array:
        return (rotate(x, rotation) if kind.rotary else x).astype(dtype)

    query, key, value = positioned(query), positioned(key), value.astype(dtype)
    query, key, value = map(checkpoint_name, (query, key, value), ("query", "key", "value"))
    attended, cache = attend(query, key, value)
    x = x + adapted("btnh,nhd->btd", attended, layer, "output")
    normed = rms_norm(x, layer["mlp_norm"], arch.rms_norm_eps)
    gate = jax.nn.silu(adapted("btd,df->btf", normed, layer, "gate"))
    up = adapted("btd,df->btf", normed, layer, "up")
    return x + adapted("btf,fd->btd", gate * up, layer, "down"), cache


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last dimension, in float32 (arXiv:1910.07467)."""
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps) * scale


def rotary(positions: jax.Array, arch: Architecture) -> KeyValue:
    """Cosine and sine [B, T, H // 2] float32 of the rotary embedding (arXiv:2104.09864)."""
    angles = positions[..., None].astype(jnp.float32) * rotary_frequencies(arch)
    return jnp.cos(angles), jnp.sin(angles)


def rotary_frequencies(arch: Architecture) -> np.ndarray:
    """Angular frequency of each pair of dimensions, [H // 2] float32, with Llama 3's scaling if it is set."""
    frequencies = arch.rope_theta ** -(np.arange(0, arch.head_dim, 2, dtype=np.float64) / arch.head_dim)
    scaling = arch.rope_scaling
    if scaling is not None:
        turns = scaling.original_max_position_embeddings * frequencies / (2 * np.pi)
        span = scaling.high_freq_factor - scaling.low_freq_factor
        smooth = np.clip((turns - scaling.low_freq_factor) / span, 0.0, 1.0)
        frequencies = frequencies * (smooth + (1 - smooth) / scaling.factor)
    return frequencies.astype(np.float32)


def rotate(x: jax.Array, rotation: KeyValue) -> jax.Array:
    """Applies the rotary embedding to [B, T, heads, H]; dimension i is paired with i + H // 2."""
    cosine, sine = (part[:, :, None] for part in rotation)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
