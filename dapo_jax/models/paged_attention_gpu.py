"""Device: attention to pages in a Triton kernel, on GPUs or in Pallas' interpreter.

Several programs divide the pages of a row, so that a few long rows keep a GPU busy (Flash-Decoding); their parts of the
softmax are merged afterwards. Sizes as in paged_attention.py.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from dapo_jax.models.attention import MASKED, capped, dot
from dapo_jax.models.paged_attention import SoftmaxParts

SPLITS = 8  # programs for a row and a key-value head
LEAST_ROWS = 16  # of an operand of a product in Triton


def attend(
    query: jax.Array,
    pages: jax.Array,
    table: jax.Array,
    starts: jax.Array,
    ends: jax.Array,
    *,
    cap: float | None = None,
    interpret: bool = False,
) -> SoftmaxParts:
    """An `AttendPages`; H and C are powers of two from 16 on.

    Args:
        cap: as in Scores.
        interpret: run the kernel in Pallas' interpreter, on any device.
    """
    (rows, heads, size), kv_heads = query.shape, pages.shape[1]
    groups = heads // kv_heads
    padded = max(LEAST_ROWS, 1 << (groups - 1).bit_length())
    query = query.astype(pages.dtype).reshape(rows, kv_heads, groups, size)
    query = jnp.pad(query, ((0, 0), (0, 0), (0, padded - groups), (0, 0)))

    def whole(x: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim)

    def part(*shape: int) -> tuple[pl.BlockSpec, jax.ShapeDtypeStruct]:
        place = (0,) * len(shape)
        spec = pl.BlockSpec((None, None, None, *shape), lambda row, head, split: (row, head, split, *place))
        return spec, jax.ShapeDtypeStruct((rows, kv_heads, SPLITS, *shape), jnp.float32)

    specs, results = zip(part(padded, size), part(padded), part(padded), strict=True)
    weighted, total, highest = pl.pallas_call(
        functools.partial(_kernel, scale=size**-0.5, cap=cap),
        grid=(rows, kv_heads, SPLITS),
        in_specs=[
            pl.BlockSpec((None, None, padded, size), lambda row, head, _: (row, head, 0, 0)),
            whole(pages),
            pl.BlockSpec((None, table.shape[1]), lambda row, *_: (row, 0)),
            whole(starts),
            whole(ends),
        ],
        out_specs=specs,
        out_shape=results,
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="paged_attention",
    )(query, pages, table, starts, ends)
    most = highest.max(axis=2, keepdims=True)
    kept = jnp.exp(highest - most)

    def of_rows(x: jax.Array) -> jax.Array:
        return x[:, :, :groups].reshape(rows, heads, *x.shape[3:])

    return SoftmaxParts(
        of_rows((weighted * kept[..., None]).sum(axis=2)), of_rows((total * kept).sum(axis=2)), of_rows(most[:, :, 0])
    )


def _kernel(query_ref, pages_ref, table_ref, starts_ref, ends_ref, weighted_ref, total_ref, highest_ref, *, scale, cap):
    """A share of the pages of one row, for one key-value head."""
    row, head, split = (pl.program_id(axis) for axis in range(3))
    query, (page_length, width) = query_ref[...], pages_ref.shape[2:]
    start, end, size = starts_ref[row], ends_ref[row], width // 2
    num_pages = pl.cdiv(end, page_length)
    share = pl.cdiv(num_pages, SPLITS)

    def step(place, carry):
        weighted, total, highest = carry
        page, tokens = table_ref[place], place * page_length + jnp.arange(page_length)
        visible = ((tokens >= start) & (tokens < end))[None, :]
        key, value = (pages_ref[page, head, :, pl.ds(first, size)] for first in (0, size))
        scores = jnp.where(visible, capped(dot(query, key.T) * scale, cap), MASKED)
        new = jnp.maximum(highest, jnp.max(scores, axis=1))
        weights, kept = jnp.where(visible, jnp.exp(scores - new[:, None]), 0.0), jnp.exp(highest - new)
        weighted = weighted * kept[:, None] + dot(weights.astype(value.dtype), value)
        return weighted, total * kept + jnp.sum(weights, axis=1), new

    nothing = jnp.zeros(query.shape, jnp.float32), jnp.zeros(len(query)), jnp.full(len(query), MASKED)
    last = jnp.minimum((split + 1) * share, num_pages)
    weighted_ref[...], total_ref[...], highest_ref[...] = jax.lax.fori_loop(split * share, last, step, nothing)
