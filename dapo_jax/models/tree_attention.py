"""Device: attention over bins in Triton kernels, on GPUs or in Pallas' interpreter.

A token sees two ranges of slots (tree_ranges.py). The kernels are FlashAttention-2 (arXiv:2307.08691) over the blocks
of these ranges: a shared prompt is stored and computed once, and the responses next to a branch are skipped.

Sizes: N bins, T slots, K key-value heads, G query heads for each of them, H head size.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from dapo_jax.data.containers import Bins
from dapo_jax.models.attention import MASKED, PLAIN, Scores, dot
from dapo_jax.models.remat import ATTENDED
from dapo_jax.models.tree_ranges import BLOCK, BRANCH_BEGIN, PROMPT_BEGIN, PROMPT_END, SEEN_TO, in_window

MAX_HEAD_SIZE = 256
LOG2_E = math.log2(math.e)  # GPUs have powers of two
Array = jax.Array


def attend(
    query: Array,
    key: Array,
    value: Array,
    bins: Bins,
    scores: Scores = PLAIN,
    *,
    sink: Array | None = None,
    interpret: bool = False,
) -> Array:
    """Attention on one device: query [N, T, K * G, H], key and value [N, T, K, H] -> [N, T, K * G, H] float32.

    Args:
        bins: with what tree_ranges.py's `prepare` adds.
        sink: [K * G] float32, as in `attention.softmax`.
        interpret: run the kernels in Pallas' interpreter, on any device.
    """
    size = query.shape[-1]
    whole = max(1 << (size - 1).bit_length(), 16)  # Triton takes powers of two from 16 on
    query, key, value = (jnp.pad(x, ((0, 0),) * 3 + ((0, whole - size),)) for x in (query, key, value))
    product = _Product(size**-0.5, scores.cap, skips=scores.window is not None)
    attended: Any = _attend(query, key, value, sink, in_window(bins, scores.window), product, interpret)
    return attended[..., :size].astype(jnp.float32)


@dataclass(frozen=True)
class _Product:
    """From the products of queries and keys to scores, as powers of two, and to their gradients."""

    scale: float
    cap: float | None
    skips: bool  # some queries between the first and the last that see a key do not see it

    def scores(self, products: Array) -> Array:
        if self.cap is None:
            return products * (self.scale * LOG2_E)
        return jnp.tanh(products * (self.scale / self.cap)) * (self.cap * LOG2_E)

    def gradient(self, of_scores: Array, scores: Array) -> Array:
        """Of the products; `scores` before the mask, whose values do not matter where `of_scores` is 0."""
        if self.cap is None:
            return of_scores * self.scale
        return of_scores * self.scale * (1 - jnp.square(scores / (self.cap * LOG2_E)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _attend(
    query: Array, key: Array, value: Array, sink: Array | None, ranges: Array, product: _Product, interpret: bool
) -> Array:
    return _forward(query, key, value, sink, ranges, product, interpret)[0]


def _forward(
    query: Array, key: Array, value: Array, sink: Array | None, ranges: Array, product: _Product, interpret: bool
) -> tuple[Array, tuple[Any, ...]]:
    """What is attended; and with it the operands and the binary logarithm [N, heads, T] of each softmax's sum."""
    sinks = [] if sink is None else [sink * LOG2_E]
    bins, width, heads, _ = query.shape
    block, groups = _block_size(query), heads // key.shape[2]
    attended, normalizer = pl.pallas_call(
        functools.partial(_forward_kernel, product=product),
        grid=(bins, heads, width // block),
        in_specs=[
            *(_block(query), _whole(key, groups), _whole(value, groups), _of_bin(ranges)),
            *(pl.BlockSpec(one.shape, lambda *_: (0,)) for one in sinks),
        ],
        out_specs=[_block(query), _block_of_numbers(block)],
        out_shape=[query, jax.ShapeDtypeStruct((bins, heads, width), jnp.float32)],
        name="tree_attention_fwd",
        **_options(query, interpret),
    )(query, key, value, ranges, *sinks)
    attended, normalizer = checkpoint_name(attended, ATTENDED), checkpoint_name(normalizer, ATTENDED)
    return attended, (query, key, value, sink, ranges, attended, normalizer)


def _forward_kernel(query_ref, key_ref, value_ref, ranges_ref, *refs, product):
    """One block of queries of one head. The last references are those of the sinks, if there are some, and results."""
    query, (*sink_refs, attended_ref, normalizer_ref) = query_ref[...], refs
    seen = _Seen(ranges_ref, pl.program_id(2), len(query))

    def step(visible, there, carry):
        attended, total, highest = carry
        scores = jnp.where(visible, product.scores(dot(query, key_ref[there, :].T)), MASKED)
        new = jnp.maximum(highest, jnp.max(scores, axis=1))
        weights, kept = jnp.exp2(scores - new[:, None]), jnp.exp2(highest - new)
        values = value_ref[there, :]
        attended = attended * kept[:, None] + dot(weights.astype(values.dtype), values)
        return attended, total * kept + jnp.sum(weights, axis=1), new

    start = jnp.zeros(query.shape, jnp.float32), jnp.zeros(len(query)), jnp.full(len(query), MASKED)
    for sink_ref in sink_refs:
        start = start[0], jnp.ones(len(query)), jnp.full(len(query), sink_ref[pl.program_id(1)])
    attended, total, highest = seen.each_block(step, start)
    attended_ref[...] = (attended / total[:, None]).astype(attended_ref.dtype)
    normalizer_ref[...] = highest + jnp.log2(total)


def _backward(product: _Product, interpret: bool, saved: tuple[Any, ...], cotangent: Array) -> tuple[Any, ...]:
    query, key, value, sink, ranges, attended, normalizer = saved
    (bins, width, heads, _), kv_heads = query.shape, key.shape[2]
    block, groups = _block_size(query), heads // kv_heads
    # of each query, what its scores' gradients have in common (arXiv:2307.08691, algorithm 2)
    common = jnp.einsum("nthd,nthd->nht", cotangent, attended, preferred_element_type=jnp.float32)
    operands = query, key, value, ranges, cotangent, normalizer, common
    to_query = pl.pallas_call(
        functools.partial(_query_kernel, product=product),
        grid=(bins, heads, width // block),
        in_specs=[
            *(_block(query), _whole(key, groups), _whole(value, groups), _of_bin(ranges)),
            *(_block(cotangent), _block_of_numbers(block), _block_of_numbers(block)),
        ],
        out_specs=_block(query),
        out_shape=query,
        name="tree_attention_dq",
        **_options(query, interpret),
    )(*operands)
    # a program for each query head, not for each of the key's: those of a shared prompt's keys take long
    of_heads = jax.ShapeDtypeStruct(query.shape, jnp.float32)
    to_key, to_value = pl.pallas_call(
        functools.partial(_key_kernel, product=product),
        grid=(bins, heads, width // block),
        in_specs=[
            *(_whole(query), _block(key, groups), _block(value, groups), _of_bin(ranges), _whole(cotangent)),
            *(pl.BlockSpec((None, None, width), lambda row, head, _: (row, head, 0)) for _ in range(2)),
        ],
        out_specs=[_block(of_heads), _block(of_heads)],
        out_shape=[of_heads, of_heads],
        name="tree_attention_dkv",
        **_options(query, interpret),
    )(*operands)
    to_key, to_value = (
        x.reshape(bins, width, kv_heads, groups, -1).sum(axis=3).astype(key.dtype) for x in (to_key, to_value)
    )
    to_sink = None  # its weight is part of a softmax, and its value 0
    if sink is not None:
        to_sink = -jnp.sum(jnp.exp2(sink[:, None] * LOG2_E - normalizer) * common, axis=(0, 2))
    return to_query, to_key, to_value, to_sink, None


def _query_kernel(
    query_ref, key_ref, value_ref, ranges_ref, cotangent_ref, normalizer_ref, common_ref, result_ref, *, product
):
    """The gradient of one block of queries of one head."""
    query, cotangent = query_ref[...], cotangent_ref[...]
    seen = _Seen(ranges_ref, pl.program_id(2), len(query))
    normalizer, common = normalizer_ref[...][:, None], common_ref[...][:, None]

    def step(visible, there, gradient):
        keys = key_ref[there, :]
        scores = product.scores(dot(query, keys.T))
        weights = jnp.exp2(jnp.where(visible, scores, MASKED) - normalizer)
        of_scores = weights * (dot(cotangent, value_ref[there, :].T) - common)
        of_products = product.gradient(of_scores, scores)
        return gradient + dot(of_products.astype(keys.dtype), keys)

    result_ref[...] = seen.each_block(step, jnp.zeros(query.shape, jnp.float32)).astype(result_ref.dtype)


def _key_kernel(
    query_ref,
    key_ref,
    value_ref,
    ranges_ref,
    cotangent_ref,
    normalizer_ref,
    common_ref,
    to_key_ref,
    to_value_ref,
    *,
    product,
):
    """The gradients of one block of keys and values, from the queries of one head that see them."""
    keys, values = key_ref[...], value_ref[...]
    number, block = pl.program_id(2), len(keys)
    slots = _slots(number, block)[:, None]

    def step(place, carry):
        there, queries = pl.ds(place * block, block), _slots(place, block)[None, :]
        begin, end, branch = (ranges_ref[row, there][None, :] for row in (PROMPT_BEGIN, PROMPT_END, BRANCH_BEGIN))
        if not product.skips:
            return add(there, queries, begin, end, branch, carry)
        first, last = number * block, number * block + block - 1
        seen = (jnp.min(branch) <= last) | (jnp.min(begin) <= last) & (jnp.max(end) > first)
        return jax.lax.cond(seen, lambda: add(there, queries, begin, end, branch, carry), lambda: carry)

    def add(there, queries, begin, end, branch, carry):
        visible = ((slots >= begin) & (slots < end)) | ((slots >= branch) & (slots <= queries))
        query, cotangent = query_ref[there, :], cotangent_ref[there, :]
        scores = product.scores(dot(keys, query.T))
        weights = jnp.exp2(jnp.where(visible, scores, MASKED) - normalizer_ref[there][None, :])
        of_scores = weights * (dot(values, cotangent.T) - common_ref[there][None, :])
        of_products = product.gradient(of_scores, scores)
        to_key, to_value = carry
        to_value += dot(weights.astype(cotangent.dtype), cotangent)
        return to_key + dot(of_products.astype(query.dtype), query), to_value

    last = pl.cdiv(jnp.max(ranges_ref[SEEN_TO, pl.ds(number * block, block)]), block)
    zeros = jnp.zeros(keys.shape, jnp.float32)
    to_key_ref[...], to_value_ref[...] = jax.lax.fori_loop(number, last, step, (zeros, zeros))


_attend.defvjp(_forward, _backward)


class _Seen:
    """The keys that a block of queries sees."""

    def __init__(self, ranges_ref: Any, number: Array, block: int) -> None:
        here = pl.ds(number * block, block)
        begin, end, branch = (ranges_ref[row, here] for row in (PROMPT_BEGIN, PROMPT_END, BRANCH_BEGIN))
        self.block, self.ranges = block, [(begin, end), (branch, _slots(number, block) + 1)]

    def each_block(self, step: Callable[[Array, Any, Any], Any], carry: Any) -> Any:
        """Carries the result of step(visible [queries, keys], keys, carry) over the blocks of both ranges."""
        block = self.block
        for begin, end in self.ranges:

            def of_range(number: Array, carry: Any, begin: Array = begin, end: Array = end) -> Any:
                keys = _slots(number, block)[None, :]
                visible = (keys >= begin[:, None]) & (keys < end[:, None])
                return step(visible, pl.ds(number * block, block), carry)

            carry = jax.lax.fori_loop(jnp.min(begin) // block, pl.cdiv(jnp.max(end), block), of_range, carry)
        return carry


def _block_size(x: Array) -> int:
    """Slots of a block of [N, T, heads, H], so that it fits a GPU's shared memory."""
    return BLOCK if x.shape[-1] <= 128 else BLOCK // 2


def _slots(number: Array, block: int) -> Array:
    """The slots of a block."""
    return number * block + jnp.arange(block)


def _block(x: Any, groups: int = 1) -> pl.BlockSpec:
    """A block of slots of one head, or of the key-value head of `groups` heads."""
    shape = (None, _block_size(x), None, x.shape[-1])
    return pl.BlockSpec(shape, lambda row, head, number: (row, number, jax.lax.div(head, jnp.int32(groups)), 0))


def _whole(x: Array, groups: int = 1) -> pl.BlockSpec:
    """All slots, as for `_block`."""
    shape = (None, x.shape[1], None, x.shape[-1])
    return pl.BlockSpec(shape, lambda row, head, _: (row, 0, jax.lax.div(head, jnp.int32(groups)), 0))


def _of_bin(ranges: Array) -> pl.BlockSpec:
    return pl.BlockSpec((None, *ranges.shape[1:]), lambda row, *_: (row, 0, 0))


def _block_of_numbers(block: int) -> pl.BlockSpec:
    """A number for each slot of a block of one head."""
    return pl.BlockSpec((None, None, block), lambda row, head, number: (row, head, number))


def _options(query: Array, interpret: bool) -> dict[str, Any]:
    warps = 4 if query.shape[-1] <= 64 else 8
    return {
        "compiler_params": triton.CompilerParams(num_warps=warps, num_stages=2),
        "interpret": interpret,
    }
