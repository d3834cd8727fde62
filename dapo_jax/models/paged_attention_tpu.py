"""Device: attention to pages in a Mosaic kernel, on TPUs or in Pallas' interpreter.

Rows are computed one after the other. The first row of a run reads the prompt for all rows of the run, whose parts of
the softmax stay in the TPU's memory for a kernel; each row goes on with its own, with its pages and its tail. Pages are
copied from HBM in blocks while the block before is computed, across rows too; pages that a row does not have are not
copied. Sizes as in paged_attention.py.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dapo_jax.models.attention import MASKED, capped
from dapo_jax.models.paged_attention import Reads, most_together

BLOCK = 512  # tokens that are computed at once; fewer if two blocks need more than ...
BUFFER = 2**23  # bytes, half of what a v5e has for a kernel, less what the parts of a run take
LANES = 128
LEAST_ROWS = 16  # of an operand of a product


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
    """An `AttendPages`; H is a multiple of 64, C of 16.

    Args:
        interpret: run the kernel in Pallas' interpreter, on any device.
    """
    (rows, heads, size), (_, kv_heads, page_length, width) = query.shape, pages.shape
    groups, runs = heads // kv_heads, reads.runs
    padded = -(-groups // LEAST_ROWS) * LEAST_ROWS
    # A head of 64 fills half of the lanes: zeros in the query take the place of a slice of keys.
    wide = size if size % LANES == 0 else width
    query = query.astype(pages.dtype).reshape(rows, kv_heads, groups, size)
    query = jnp.pad(query, ((0, 0), (0, 0), (0, padded - groups), (0, wide - size)))
    sinks = jnp.full((kv_heads, groups, 1), MASKED) if sink is None else sink.reshape(kv_heads, groups, 1)
    sinks = jnp.pad(sinks, ((0, 0), (0, padded - groups), (0, 0)), constant_values=MASKED)
    most = 1 if runs is None else min(most_together(groups, kv_heads), rows)
    of_runs = (jnp.zeros(rows, jnp.int32),) * 2 if runs is None else (runs.lengths, runs.ends)
    numbers = reads.table.reshape(-1), reads.starts, reads.ends, *of_runs, jnp.reshape(index, 1)

    def of_row(*sizes: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, kv_heads, *sizes), lambda row, *_: (row, 0, 0, 0))

    in_memory, of_all = pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec((kv_heads, padded, 1), lambda *_: (0, 0, 0))
    free = BUFFER - 4 * kv_heads * most * padded * (wide + LANES)
    at_once = max(min(BLOCK, free // (2 * kv_heads * width * pages.dtype.itemsize)) // page_length, 1)
    attended = pl.pallas_call(
        functools.partial(_kernel, scale=size**-0.5, window=window, cap=cap, row_pages=reads.table.shape[1]),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(numbers),
            grid=(rows,),
            in_specs=[of_row(padded, wide), in_memory, of_row(*tail.shape[2:]), of_all, in_memory],
            out_specs=of_row(groups, size),
            scratch_shapes=[
                pltpu.VMEM((2, at_once, *pages.shape[1:]), pages.dtype),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.VMEM((most, kv_heads, padded, wide), pages.dtype),
                pltpu.SemaphoreType.DMA(()),
                pltpu.SMEM((1,), jnp.int32),
                *(pltpu.VMEM((kv_heads, most, padded, last), jnp.float32) for last in (wide, LANES)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((rows, kv_heads, groups, size), pages.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="paged_attention" if runs is None else "paged_attention_and_runs",
    )(*numbers, query, pages, tail, sinks, query)
    return attended.reshape(rows, heads, size)


def _kernel(
    table_ref,
    starts_ref,
    ends_ref,
    lengths_ref,
    prompt_ends_ref,
    index_ref,
    query_ref,
    pages_ref,
    tail_ref,
    sinks_ref,
    queries_ref,
    result_ref,
    buffer,
    arrived,
    current,
    run_queries,
    queries_arrived,
    run_first,
    weighted_ref,
    sums_ref,
    *,
    scale,
    window,
    cap,
    row_pages,
):
    """One row, and before it the prompt of the run that begins with it, if one does.

    From row to row stay: the half `current` of `buffer` that the next block arrives in, or has arrived in; and of the
    last run its queries, the row of the first of them, and its parts: `weighted`, and the sums as `_in_lanes`.
    """
    row, rows = pl.program_id(0), pl.num_programs(0)
    _, at_once, kv_heads, page_length, width = buffer.shape
    (_, padded, wide), (_, groups, size), most = query_ref.shape, result_ref.shape, len(run_queries)
    see = functools.partial(_see, scale=scale, cap=cap)

    def tokens_of(turn):
        """The first token that is read in a turn, and the one after the last: each row has a turn for its run, and one
        for itself."""
        row, alone = turn // 2, turn % 2 == 1
        start, prompt = starts_ref[row], prompt_ends_ref[row]
        of_run = jnp.where(lengths_ref[row] > 0, prompt, 0)
        return jnp.where(alone, jnp.maximum(start, prompt), start), jnp.where(alone, ends_ref[row], of_run)

    def pages_of(turn):
        """The first of its pages, and how many."""
        start, end = tokens_of(turn)
        first = start // page_length
        return first, jnp.maximum(pl.cdiv(end, page_length) - first, 0)

    def each_page(turn, number, half, act):
        first, count = pages_of(turn)

        def copy(place, _):
            page = table_ref[turn // 2 * row_pages + first + number * at_once + place]
            act(pltpu.make_async_copy(pages_ref.at[page], buffer.at[half, place], arrived.at[half]))
            return 0

        jax.lax.fori_loop(0, jnp.minimum(count - number * at_once, at_once), copy, 0)

    def fetch_first_from(turn, half):
        """Begins to copy the first block of the next turn that has one."""

        def has_none(turn):
            return (turn < 2 * rows) & (pages_of(jnp.minimum(turn, 2 * rows - 1))[1] == 0)

        found = jax.lax.while_loop(has_none, lambda turn: turn + 1, turn)

        @pl.when(found < 2 * rows)
        def _():
            each_page(found, 0, half, lambda copy: copy.start())

    def each_block(turn, look, parts):
        """`parts` after `look` at each block of a turn: [at_once, K, C, 2H], and which tokens are visible [1, T]."""
        (start, end), (first, count) = tokens_of(turn), pages_of(turn)
        blocks, block = pl.cdiv(count, at_once), at_once * page_length

        def step(number, parts):
            half = current[0]

            @pl.when(number + 1 < blocks)
            def _():
                each_page(turn, number + 1, 1 - half, lambda copy: copy.start())

            @pl.when(number + 1 == blocks)
            def _():
                fetch_first_from(turn + 1, 1 - half)

            each_page(turn, number, half, lambda copy: copy.wait())
            current[0] = 1 - half
            tokens = first * page_length + number * block + jax.lax.broadcasted_iota(jnp.int32, (1, block), 1)
            return look(buffer.at[half], (tokens >= start) & (tokens < end), parts)

        return jax.lax.fori_loop(0, blocks, step, parts)

    @pl.when(row == 0)
    def _():
        buffer[...] = jnp.zeros(buffer.shape, buffer.dtype)  # no NaN where nothing is copied to
        current[0] = 0
        fetch_first_from(0, 0)

    @pl.when(pages_of(2 * row)[1] > 0)
    def _():
        run_first[0] = jnp.minimum(row, rows - most)
        copy = pltpu.make_async_copy(queries_ref.at[pl.ds(run_first[0], most)], run_queries, queries_arrived)
        copy.start()
        nothing = jnp.zeros((*sums_ref.shape[:-1], 1))
        weighted_ref[...] = jnp.zeros(weighted_ref.shape)
        sums_ref[...] = _in_lanes(nothing, nothing + MASKED)
        copy.wait()

        def look(block, visible, _):
            def of_head(head, _):
                parts = weighted_ref[head], *_from_lanes(sums_ref[head])
                parts = [x.reshape(most * padded, -1) for x in parts]
                of_all = run_queries[:, head].reshape(most * padded, wide)
                parts = see(of_all, block[:, head].reshape(-1, width), visible, *parts)
                weighted_ref[head] = parts[0].reshape(weighted_ref.shape[1:])
                sums_ref[head] = _in_lanes(*parts[1:]).reshape(sums_ref.shape[1:])
                return 0

            return jax.lax.fori_loop(0, kv_heads, of_head, 0)

        each_block(2 * row, look, 0)

    def begin(head):
        """The parts of the sink, and those of the run if the row is in one."""
        sink, place = sinks_ref[head], jnp.clip(row - run_first[0], 0, most - 1)
        parts = jnp.zeros((padded, wide)), jnp.where(sink > MASKED, 1.0, 0.0), sink
        joined = _joined(parts, (weighted_ref[head, place], *_from_lanes(sums_ref[head, place])))
        is_in_run = starts_ref[row] < prompt_ends_ref[row]
        return tuple(jnp.where(is_in_run, new, old) for new, old in zip(joined, parts, strict=True))

    def look(block, visible, parts):
        return tuple(
            see(query_ref[head], block[:, head].reshape(-1, width), visible, *of_head)
            for head, of_head in enumerate(parts)
        )

    parts = each_block(2 * row + 1, look, tuple(begin(head) for head in range(kv_heads)))
    places = jax.lax.broadcasted_iota(jnp.int32, (1, tail_ref.shape[1]), 1)
    visible = places <= index_ref[0]
    if window is not None:
        visible &= places > index_ref[0] - window
    for head, of_head in enumerate(parts):
        weighted, total = see(query_ref[head], tail_ref[head], visible, *of_head)[:2]
        result_ref[head] = (weighted / total)[:groups, -size:].astype(result_ref.dtype)


def _see(query, keys_and_values, visible, weighted, total, highest, *, scale, cap):
    """The parts of the softmax with those of a block; keys_and_values [T, 2H], visible [1, T]."""
    wide = query.shape[1]
    key, value = keys_and_values[:, :wide], keys_and_values[:, -wide:]
    scores = jnp.where(visible, capped(_product(query, key, ((1,), (1,))) * scale, cap), MASKED)
    new = jnp.maximum(highest, jnp.max(scores, axis=1, keepdims=True))
    weights, kept = jnp.where(visible, jnp.exp(scores - new), 0.0), jnp.exp(highest - new)
    weighted = weighted * kept + _product(weights.astype(value.dtype), value, ((1,), (0,)))
    return weighted, total * kept + jnp.sum(weights, axis=1, keepdims=True), new


def _joined(parts, others):
    """The parts of one softmax from those of two sets of keys."""
    highest = jnp.maximum(parts[2], others[2])
    kept, scale = jnp.exp(parts[2] - highest), jnp.exp(others[2] - highest)
    return parts[0] * kept + others[0] * scale, parts[1] * kept + others[1] * scale, highest


def _in_lanes(total, highest):
    """[..., 1] each -> [..., LANES], total in the first half."""
    shape = (*total.shape[:-1], LANES)
    return jnp.where(jax.lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1) < LANES // 2, total, highest)


def _from_lanes(sums):
    return sums[..., :1], sums[..., LANES // 2 : LANES // 2 + 1]


def _product(x, y, contracted):
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dimensions = contracted, ((), ())
    return jax.lax.dot_general(x, y, dimensions, precision=precision, preferred_element_type=jnp.float32)
