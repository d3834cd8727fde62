"""Device: attention to pages in two Triton kernels, on GPUs or in Pallas' interpreter.

The first reads a prompt once for a run of rows that share it. The second goes on with that for each row: its own pages,
then the tail. Where rows are few, several programs divide the pages, so that a GPU has enough to do (Flash-Decoding).
What each finds is a part of one softmax. Sizes as in paged_attention.py; S programs divide pages; a key-value head has
Q = B * G queries, those of a row together.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from dapo_jax.models.attention import MASKED, capped, dot
from dapo_jax.models.paged_attention import Reads, SoftmaxParts, merged, most_together

PROGRAMS, MOST_SPLITS = 256, 8  # programs that keep a GPU busy; those that divide the pages of a row, at most
LEAST_ROWS = 16  # of an operand of a product in Triton


def attend(
    query: jax.Array,
    pages: jax.Array,
    tail: jax.Array,
    index: jax.Array,
    reads: Reads,
    sink: jax.Array | None = None,
    *,
    window: int | None = None,
    cap: float | None = None,
    interpret: bool = False,
) -> jax.Array:
    """An `AttendPages`; H and C are powers of two from 16 on.

    Args:
        interpret: run the kernels in Pallas' interpreter, on any device.
    """
    (rows, heads, size), kv_heads, runs = query.shape, pages.shape[1], reads.runs
    groups, starts, found = heads // kv_heads, reads.starts, []
    by_head = query.astype(pages.dtype).reshape(rows, kv_heads, groups, size).swapaxes(0, 1)
    by_head = by_head.reshape(kv_heads, rows * groups, size)
    call = functools.partial(_call, interpret=interpret, groups=groups, scale=size**-0.5, cap=cap)
    if runs is not None:
        most = most_together(groups, kv_heads)
        splits = _splits(-(-rows // most) * kv_heads)  # as if all runs were the longest
        arrays = by_head, pages, reads.table, runs.lengths, reads.starts, runs.ends
        found = call(
            _run, "paged_attention_of_runs", (rows, kv_heads, splits), _parts(splits, by_head), arrays, most=most
        )
        starts = jnp.maximum(starts, runs.ends)
    splits = _splits(rows * kv_heads)
    results = _parts(splits, by_head) if splits > 1 else [jax.ShapeDtypeStruct(query.shape, pages.dtype)]
    arrays = by_head, pages, reads.table, starts, reads.ends, jnp.reshape(index, 1), tail
    arrays += (reads.starts, *found) if found else ()
    if sink is not None:
        arrays += (jnp.broadcast_to(sink.reshape(kv_heads, 1, groups), (kv_heads, rows, groups)).reshape(kv_heads, -1),)
    static = {"num_found": len(found), "has_sink": sink is not None, "window": window}
    parts = call(_row, "paged_attention", (rows, kv_heads, splits), results, arrays, **static)
    if splits == 1:
        return parts[0]
    attended = merged([SoftmaxParts(*(x[split] for x in parts)) for split in range(splits)])
    attended = attended.reshape(kv_heads, rows, groups, size).swapaxes(0, 1)
    return attended.reshape(query.shape).astype(pages.dtype)


def _splits(programs: int) -> int:
    """How many programs divide the pages of each of these."""
    splits = 1
    while splits < MOST_SPLITS and splits * programs < PROGRAMS:
        splits *= 2
    return splits


def _parts(splits: int, query: jax.Array) -> list[jax.ShapeDtypeStruct]:
    """Parts of the softmax: weighted [S, K, Q, H], total and highest [S, K, Q]."""
    shapes = (splits, *query.shape), (splits, *query.shape[:2]), (splits, *query.shape[:2])
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]


def _call(
    kernel: Callable[..., None],
    name: str,
    grid: tuple[int, ...],
    results: list[jax.ShapeDtypeStruct],
    arrays: Sequence[jax.Array],
    *,
    interpret: bool,
    **sizes: Any,
) -> list[jax.Array]:
    return pl.pallas_call(
        functools.partial(kernel, **sizes),
        grid=grid,
        out_shape=results,
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name=name,
    )(*arrays)


class _Queries(NamedTuple):
    """Queries of rows one behind the other, for one key-value head, padded to a power of two."""

    head: Any
    places: Any  # of Q
    real: jax.Array  # [padded] bool

    @classmethod
    def of_rows(cls, head: Any, first: Any, length: Any, *, most: int, groups: int) -> "_Queries":
        """Those of `length` rows from the `first` on, at most `most`."""
        padded = max(LEAST_ROWS, 1 << (most * groups - 1).bit_length())
        return cls(head, pl.ds(first * groups, padded), jnp.arange(padded) < length * groups)

    def wide(self, size: int) -> jax.Array:
        """`real` for arrays [padded, H]."""
        return jnp.broadcast_to(self.real[:, None], (len(self.real), size))

    def no_parts(self, size: int) -> Any:
        """The parts of a softmax without keys."""
        padded = len(self.real)
        return jnp.zeros((padded, size)), jnp.zeros(padded), jnp.full(padded, MASKED)

    def load(self, ref: Any) -> jax.Array:
        """From [K, Q, H]; zeros where there are no queries."""
        return triton.load(ref.at[self.head, self.places, :], mask=self.wide(ref.shape[-1]), other=0.0)

    def join_parts(self, refs: Any, here: Any, split: Any, parts: Any) -> Any:
        """`parts` with those that lie in `refs`, if they are `here`."""
        (weighted_ref, *number_refs), wide = refs, self.wide(parts[0].shape[-1]) & here
        weighted = triton.load(weighted_ref.at[split, self.head, self.places, :], mask=wide, other=0.0)
        total, highest = (
            triton.load(ref.at[split, self.head, self.places], mask=self.real & here, other=other)
            for ref, other in zip(number_refs, (0.0, MASKED), strict=True)
        )
        new = jnp.maximum(parts[2], highest)
        old_scale, scale = jnp.exp(parts[2] - new), jnp.exp(highest - new)
        return parts[0] * old_scale[:, None] + weighted * scale[:, None], parts[1] * old_scale + total * scale, new

    def join_sink(self, ref: Any, here: Any, parts: Any) -> Any:
        """`parts` with the sinks in `ref` [K, Q], which have no value, if they are `here`."""
        sink = triton.load(ref.at[self.head, self.places], mask=self.real & here, other=MASKED)
        new = jnp.maximum(parts[2], sink)
        kept = jnp.exp(parts[2] - new)
        return parts[0] * kept[:, None], parts[1] * kept + jnp.where(here, jnp.exp(sink - new), 0.0), new

    def store_parts(self, refs: Any, split: Any, parts: Any) -> None:
        """Parts of the softmax into `refs`."""
        masks = self.wide(parts[0].shape[-1]), self.real, self.real
        for ref, part, mask in zip(refs, parts, masks, strict=True):
            places = (split, self.head, self.places) + (slice(None),) * (part.ndim - 1)
            triton.store(ref.at[places], part, mask=mask)


def _run(
    query_ref,
    pages_ref,
    table_ref,
    lengths_ref,
    starts_ref,
    ends_ref,
    *parts_refs,
    most,
    groups,
    scale,
    cap,
):
    """A share of a run's prompt, for one key-value head. Programs of rows with which no run begins do nothing."""
    row, head, split = (pl.program_id(axis) for axis in range(3))
    length, size = lengths_ref[row], query_ref.shape[-1]
    queries = _Queries.of_rows(head, row, length, most=most, groups=groups)
    end = jnp.where(length > 0, ends_ref[row], 0)
    see = functools.partial(_see, queries.load(query_ref), head, scale=scale, cap=cap)
    parts = _see_pages(see, pages_ref, table_ref, row, starts_ref[row], end, queries.no_parts(size))
    queries.store_parts(parts_refs, split, parts)


def _row(
    query_ref,
    pages_ref,
    table_ref,
    starts_ref,
    ends_ref,
    index_ref,
    tail_ref,
    *refs,
    num_found,
    has_sink,
    window,
    groups,
    scale,
    cap,
):
    """A share of a row's own pages, for one key-value head; the first share with its prompt and the tail.

    The last references are those of the row's first token and of what runs have `num_found`, if there are runs; of the
    sinks of queries [K, Q], if there are some; then come the results.
    """
    row, head, split = (pl.program_id(axis) for axis in range(3))
    start, index, size, is_first = starts_ref[row], index_ref[0], query_ref.shape[-1], split == 0
    queries = _Queries.of_rows(head, row, 1, most=1, groups=groups)
    parts = queries.no_parts(size)
    if num_found:
        first_ref, *found_refs = refs[: 1 + num_found]
        refs = refs[1 + num_found :]
        join = functools.partial(queries.join_parts, found_refs, is_first & (first_ref[row] < start))
        parts = jax.lax.fori_loop(0, found_refs[0].shape[0], join, parts)
    if has_sink:
        sink_ref, *refs = refs
        parts = queries.join_sink(sink_ref, is_first, parts)
    see = functools.partial(_see, queries.load(query_ref), head, scale=scale, cap=cap)
    parts = _see_pages(see, pages_ref, table_ref, row, start, ends_ref[row], parts)
    places = jnp.arange(tail_ref.shape[2])
    visible = is_first & (places <= index)
    if window is not None:
        visible &= places > index - window
    parts = see(tail_ref, row, visible, parts)
    if len(refs) != 1:
        queries.store_parts(refs, split, parts)
        return
    attended = (parts[0] / parts[1][:, None]).astype(refs[0].dtype)
    triton.store(refs[0].at[row, pl.ds(head * groups, len(attended)), :], attended, mask=queries.wide(size))


def _see_pages(see, pages_ref, table_ref, row, start, end, parts):
    """`parts` with this program's share of a row's tokens start <= t < end."""
    page_length = pages_ref.shape[2]
    first, last = start // page_length, pl.cdiv(end, page_length)
    share = pl.cdiv(jnp.maximum(last - first, 0), pl.num_programs(2))
    first += pl.program_id(2) * share

    def step(place, parts):
        tokens = place * page_length + jnp.arange(page_length)
        return see(pages_ref, table_ref[row, place], (tokens >= start) & (tokens < end), parts)

    return jax.lax.fori_loop(first, jnp.minimum(first + share, last), step, parts)


def _see(query, head, ref, number, visible, parts, *, scale, cap):
    """`parts` with the tokens `visible` [C] of a page, or of a row of the tail; no others are read."""
    (weighted, total, highest), size = parts, query.shape[1]
    mask = jnp.broadcast_to(visible[:, None], (len(visible), size))
    key, value = (triton.load(ref.at[number, head, :, pl.ds(first, size)], mask=mask, other=0.0) for first in (0, size))
    scores = jnp.where(visible[None], capped(dot(query, key.T) * scale, cap), MASKED)
    new = jnp.maximum(highest, jnp.max(scores, axis=1))
    weights, kept = jnp.where(visible[None], jnp.exp(scores - new[:, None]), 0.0), jnp.exp(highest - new)
    weighted = weighted * kept[:, None] + dot(weights.astype(value.dtype), value)
    return weighted, total * kept + jnp.sum(weights, axis=1), new
