"""Device: splash attention over bins, on TPUs or in Pallas' interpreter; host: which blocks of scores it computes.

Splash skips blocks by a table, and masks the others by a function of two numbers: one of the query, which may hold
anything, and the slot of the key. Keys and values of shared prompts are appended a second time, at the end, so that
one range of keys is left to each query among the slots, from the start of its branch to itself. A window narrows this
range; no number is left to say how much of a shared prompt it reaches, so that with windows responses share none.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask_info

from dapo_jax.data.containers import Bins
from dapo_jax.models.attention import PLAIN, Scores
from dapo_jax.models.remat import ATTENDED

LANES, BLOCK = 128, 512  # the smallest block of slots, and the largest
BITS = 15  # of a slot in a query's number
SHARED_WIDTH = 1 << BITS  # slots of the widest bin with shared prompts


def rounded_width(width: int) -> int:
    """The width of a bin that whole blocks fill."""
    block = BLOCK if width > 4 * BLOCK else LANES
    return -(-width // block) * block


def block_size(width: int) -> int:
    """Slots of a block, which divides `width`, a multiple of LANES."""
    return max(size for size in range(LANES, BLOCK + 1, LANES) if width % size == 0)


def prepare(bins: Bins) -> Bins:
    """Host: adds what each query sees, the slots of shared prompts, and the table of blocks."""
    width = bins.trees.shape[1]
    block = block_size(width)
    starts, shared = map(np.stack, zip(*map(_starts, bins.trees, bins.branches), strict=True))
    of_prompts, of_responses = shared & (bins.branches == 0), shared & (bins.branches > 0)
    size = -(-int(of_prompts.sum(axis=1).max()) // block) * block
    slots = np.full((len(shared), size), -1, np.int32)
    for row, found in enumerate(of_prompts):
        slots[row, : found.sum()] = np.flatnonzero(found)
    first = np.arange(0, width, block)
    blocks = (first[None, :] <= first[:, None]) & (first + block > starts[:, ::block, None])
    if size:
        seen = np.where(slots >= 0, np.take_along_axis(bins.trees, slots, axis=1), -2)
        blocks = np.concatenate([blocks, _meet(np.where(of_responses, bins.trees, -1), seen, block)], axis=2)
    queries = np.arange(width)
    if width <= SHARED_WIDTH:
        queries = queries | starts << BITS | of_responses << 2 * BITS
    added = {
        "queries": np.broadcast_to(queries, starts.shape).astype(np.int32),
        "prompt_slots": slots if size else None,
        "blocks": blocks.astype(np.int8),
    }
    return dataclasses.replace(bins, **added)


def _starts(trees: np.ndarray, branches: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each slot [T] of a bin, the first slot that it sees among the slots; and whether its prompt is shared."""
    places = np.arange(len(trees))
    begins = np.diff(trees, prepend=-1) != 0
    branch_begins = begins | (np.diff(branches, prepend=-1) != 0)
    responses = np.bincount(trees[branch_begins & (branches > 0)], minlength=trees.max() + 1)
    shared = responses[trees] > 1
    begins |= branch_begins & shared
    return np.maximum.accumulate(np.where(begins, places, 0)), shared


def _meet(queries: np.ndarray, keys: np.ndarray, block: int) -> np.ndarray:
    """[N, queries / block, keys / block]: whether a block of one has a tree of a block of the other; negative: none."""

    def trees(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        x = x.reshape(len(x), -1, block)
        return np.where(x < 0, np.iinfo(np.int32).max, x).min(axis=2), x.max(axis=2)  # they ascend in a bin

    (low, high), (first, last) = trees(queries), trees(keys)
    return (low[:, :, None] <= last[:, None, :]) & (first[:, None, :] <= high[:, :, None])


def pairs(bins: Bins, window: int | None = None) -> np.ndarray:
    """Host: [N] scores that are computed."""
    width = bins.trees.shape[1]
    return _reached(bins.blocks, width, window).sum(axis=(1, 2), dtype=np.float64) * block_size(width) ** 2


def _reached(blocks: Any, width: int, window: int | None) -> Any:
    """The blocks in which a query has a key in its window."""
    if window is None:
        return blocks
    block = block_size(width)
    first = np.arange(0, width, block)
    return blocks * (first + block > first[:, None] - window + 1).astype(np.int8)


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bins: Bins,
    scores: Scores = PLAIN,
    *,
    sink: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Attention on one device: query [N, T, heads, H], key and value [N, T, K, H] -> [N, T, heads, H] float32.

    Args:
        bins: with what `prepare` adds; no responses share a prompt if there is a window.
        sink: [heads] float32, as in `attention.softmax`.
        interpret: run the kernel in Pallas' interpreter, on any device.
    """
    trees, slots, width = bins.trees, bins.prompt_slots, bins.trees.shape[1]
    seen, query = trees, (query.astype(jnp.float32) * query.shape[-1] ** -0.5).astype(query.dtype)
    if slots is not None:
        assert scores.window is None
        of_prompts = jnp.where(slots >= 0, jnp.take_along_axis(trees, slots, axis=1), -1)
        seen = jnp.concatenate([trees, of_prompts], axis=1)
        slots = jnp.maximum(slots, 0)[:, :, None, None]
        key = jnp.concatenate([key, jnp.take_along_axis(key, slots, axis=1)], axis=1)
        value = jnp.concatenate([value, jnp.take_along_axis(value, slots, axis=1)], axis=1)

    def of_bin(arrays):
        query, key, value, queries, blocks, *trees = arrays
        kernel = _kernel(queries, blocks, width, scores, interpret)
        return kernel(query, key, value, splash_attention.SegmentIds(*trees), sink)

    arrays = *(x.swapaxes(1, 2) for x in (query, key, value)), bins.queries, bins.blocks, trees, seen
    one_bin = jax.tree.map(lambda x: x[0], arrays)
    attended = of_bin(one_bin)[None] if len(trees) == 1 else jax.lax.map(of_bin, arrays)
    return attended.swapaxes(1, 2).astype(jnp.float32)


def _kernel(queries: jax.Array, blocks: jax.Array, width: int, scores: Scores, interpret: bool) -> Any:
    """The kernel of one bin, with its table of blocks."""
    block, blocks = block_size(width), _reached(blocks, width, scores.window)
    forward = _mask_info(blocks, queries, in_rows=True)
    return splash_attention_kernel.SplashAttentionKernel(
        forward,
        forward,
        _mask_info(blocks, queries, in_rows=False),
        block_sizes=splash_attention.BlockSizes(
            block_q=block,
            block_kv=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_q_dq=block,
            block_kv_dq=block,
        ),
        is_mqa=False,
        save_residuals=False,
        mask_value=splash_attention_kernel.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=scores.cap,
        residual_checkpoint_name=ATTENDED,
        mask_function=_sees(width, scores.window),
        interpret=interpret,
    )


def _mask_info(blocks: jax.Array, queries: jax.Array, *, in_rows: bool) -> Any:
    """The table as the kernel reads it: each entry also names the block that is loaded, the next one to compute.

    Args:
        in_rows: whether the kernel goes through a row of the table, or through a column.
    """
    ordered = blocks if in_rows else blocks.T
    place = jnp.arange(ordered.size, dtype=jnp.int32)
    following = jax.lax.cummin(jnp.where(ordered.reshape(-1) > 0, place, ordered.size - 1), reverse=True)
    following = (following % ordered.shape[1]).reshape(ordered.shape)
    return splash_attention_mask_info.MaskInfo(
        data_next=(following if in_rows else following.T)[None],
        mask_next=None,
        block_mask=blocks[None].astype(jnp.int32),
        partial_mask_blocks=None,
        q_sequence=cast(Any, queries),
    )


@functools.cache
def _sees(width: int, window: int | None) -> Callable[[Any, Any], Any]:
    """Whether a query sees a key of the same tree, from `Bins.queries` and the key's slot."""

    def in_window(query, slot):
        place = query if width > SHARED_WIDTH else query & (SHARED_WIDTH - 1)
        return (slot <= place) & (slot > place - window)

    def sees(query, slot):
        place, start = query & (SHARED_WIDTH - 1), query >> BITS & (SHARED_WIDTH - 1)
        return ((slot <= place) & (slot >= start)) | ((slot >= width) & (query >> 2 * BITS > 0))

    if window is not None:
        return in_window
    return sees if width <= SHARED_WIDTH else lambda query, slot: slot <= query
