"""Device: keys and values of one layer of a wave, and which of them a token sees.

Sizes: Q prompts with B // Q samples each, K key-value heads, H head size, P tokens of a prompt and W of the generated
part for which a layer has room: a layer with a window has room for at most that many of each.

A layer with a window keeps the last P columns of left-padded prompts, and its own part is a ring: token j is in slot
j % W. The ring is full when it has as many slots as the window; before that, it never wraps.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from dapo_jax.models.architecture import Architecture, Layer


@struct.dataclass
class LayerCache:
    """Keys and values of one layer. The samples of a prompt share its part of the cache."""

    prompt_key: jax.Array  # [Q, K, H, P]
    prompt_value: jax.Array  # [Q, K, P, H]
    key: jax.Array  # [B, K, H, W] of sampled tokens, written at one index for all rows
    value: jax.Array  # [B, K, W, H]

    @property
    def window(self) -> int:
        """W, the number of tokens that each row has room for."""
        return self.value.shape[2]

    @property
    def width(self) -> int:
        """P, the number of tokens of a prompt."""
        return self.prompt_value.shape[2]


def held(kind: Layer, tokens: int) -> int:
    """Of so many tokens of a prompt or a response, those that a layer has room for."""
    return tokens if kind.window is None else min(tokens, kind.window)


def layer_cache(
    make: Callable[..., Any], kind: Layer, arch: Architecture, *, rows: int, prompts: int, width: int, window: int
) -> LayerCache:
    """The cache of a layer for `rows` rows of `prompts` prompts of `width` tokens and `window` more.

    Args:
        make: from a shape to an array.
    """
    heads, size, width, window = arch.num_kv_heads, arch.head_dim, held(kind, width), held(kind, window)
    return LayerCache(
        make((prompts, heads, size, width)),
        make((prompts, heads, width, size)),
        make((rows, heads, size, window)),
        make((rows, heads, window, size)),
    )


def last_columns(cache: LayerCache, key: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of the keys and values of whole prompts [Q, K, H, T] and [Q, K, T, H], what the cache has room for."""
    return key[..., -cache.width :], value[:, :, -cache.width :]


def with_token(kind: Layer, cache: LayerCache, key: jax.Array, value: jax.Array, index: jax.Array) -> LayerCache:
    """The cache with token `index` of every row, of key [B, K, H, 1] and value [B, K, 1, H]."""
    update, place = jax.lax.dynamic_update_slice_in_dim, index if kind.window is None else index % cache.window
    return dataclasses.replace(
        cache, key=update(cache.key, key, place, axis=3), value=update(cache.value, value, place, axis=2)
    )


def seen(kind: Layer, cache: LayerCache, prompt_mask: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What token `index` of every row sees once it is in the cache: its slots [W], and the prompts' columns [Q, P].

    A ring holds the last W tokens, of which it has the first when index is W.

    Args:
        prompt_mask: [Q, T] bool, True on the real tokens of whole prompts.
    """
    own, columns = jnp.arange(cache.window) <= index, prompt_mask[:, prompt_mask.shape[1] - cache.width :]
    if kind.window is not None:
        columns = columns & (jnp.arange(-cache.width, 0) > index - kind.window)
    return own, columns
