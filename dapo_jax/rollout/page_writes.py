"""Device: how keys and values get into pages. Sizes as in pages.py, for b rows and chunks of c tokens."""

import jax
import jax.numpy as jnp

from dapo_jax.parallel.sharding import constrain, on_mesh
from dapo_jax.rollout.decoding import HEADS, ROWS


def as_pages(key: jax.Array, value: jax.Array, page_length: int) -> jax.Array:
    """Keys [Q, K, H, P] and values [Q, K, P, H] of prompts as pages [Q * P // C, K, C, 2H]."""
    both = jnp.concatenate([key.swapaxes(2, 3), value], axis=-1)
    prompts, heads, width, size = both.shape
    pages = both.reshape(prompts, heads, width // page_length, page_length, size).swapaxes(1, 2)
    return constrain(pages.reshape(-1, heads, page_length, size), HEADS)


def put_chunk(
    held: jax.Array, new: jax.Array, places: jax.Array, sampled: jax.Array, follows: jax.Array | None = None
) -> jax.Array:
    """`held` with chunks [b, K, c, 2H] that follow `sampled` [b] tokens of rows, in the pages `places` [b].

    With places [b, 2] they may begin anywhere: a page is divided into parts of c tokens, and a chunk goes to the end of
    one part, after what it has there, and to the begin of the next, which may be the first part of the second page.
    Where it `follows` [b] that of the row before, that has the same part.
    """
    length, chunk = held.shape[2], new.shape[2]
    if places.ndim == 1:
        return put(held, new, places, None if chunk == length else sampled % length // chunk)
    heads, rows = on_mesh((HEADS, ROWS))
    put_all = jax.shard_map(_put_anywhere, in_specs=(heads, heads, rows, rows, rows), out_specs=heads)
    return put_all(held, new, places, sampled, jnp.zeros_like(sampled, bool) if follows is None else follows)


def _put_anywhere(
    held: jax.Array, new: jax.Array, places: jax.Array, sampled: jax.Array, follows: jax.Array
) -> jax.Array:
    """As `put_chunk` with places [b, 2], of a shard."""
    length, chunk = held.shape[2], new.shape[2]
    divided = held.reshape(*held.shape[:2], -1, chunk, held.shape[3])
    part, begin = sampled % length // chunk, sampled % chunk
    both = jnp.concatenate([new, jnp.zeros_like(new)], axis=2)
    for step in [1 << bit for bit in range((chunk - 1).bit_length())]:  # cheaper than a gather of tokens
        both = jnp.where((begin & step > 0)[:, None, None, None], jnp.roll(both, step, axis=2), both)
    is_new = jnp.arange(chunk)[:, None] >= begin[:, None, None, None]
    rest = both[:, :, chunk:]
    begun = jax.lax.optimization_barrier(divided[places[:, 0], :, part])  # read before it is written: nothing is copied
    there = jnp.where(follows[:, None, None, None], jnp.roll(rest, 1, axis=0), begun)
    first = jnp.where(is_new, both[:, :, :chunk], there)
    ends_page, is_followed = part + 1 == length // chunk, jnp.roll(follows, -1)
    second = jnp.where((begin > 0) & ~is_followed, jnp.where(ends_page, places[:, 1], places[:, 0]), 0)
    places = jnp.concatenate([places[:, 0], second])
    parts = jnp.concatenate([part, jnp.where(ends_page, 0, part + 1)])
    return _put_locally(held, jnp.concatenate([first, rest]), places, parts)


def put(held: jax.Array, pages: jax.Array, places: jax.Array, parts: jax.Array | None = None) -> jax.Array:
    """`held` with `pages` at `places`, or with the `parts` of pages, each shard's own; nothing is written to page 0."""
    heads, rows = on_mesh((HEADS, ROWS))
    arrays = held, pages, places, *([] if parts is None else [parts])
    specs = heads, heads, *[rows] * (len(arrays) - 2)
    return jax.shard_map(_put_locally, in_specs=specs, out_specs=heads)(*arrays)


def _put_locally(held: jax.Array, pages: jax.Array, places: jax.Array, parts: jax.Array | None = None) -> jax.Array:
    """As `put`, of a shard.

    All of these but those of page 0 differ, and this says so: a GPU then stores, without atomics, which are slow in 16
    bits.
    """
    outside = len(held) + jnp.arange(len(places))  # these are dropped, and differ too
    places = jnp.where(places > 0, places, outside)
    given = {"mode": "drop", "unique_indices": True, "wrap_negative_indices": False}
    if parts is None:
        return held.at[places].set(pages, **given)
    divided = held.reshape(*held.shape[:2], -1, *pages.shape[2:])
    return divided.at[places, :, parts].set(pages, **given).reshape(held.shape)
