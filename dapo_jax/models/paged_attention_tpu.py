"""Device: attention to pages in a Mosaic kernel, on TPUs or in Pallas' interpreter.

Pages are copied from HBM in blocks while the block before is computed, across rows too; pages that a row does not have
are not copied. Sizes as in paged_attention.py.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dapo_jax.models.attention import MASKED, capped
from dapo_jax.models.paged_attention import Reads, SoftmaxParts, attend_tail, merged

BLOCK = 512  # tokens that are computed at once; fewer if two blocks need more than ...
BUFFER = 2**23  # bytes, half of what a v5e has for a kernel
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
    found = _attend_pages(query, pages, reads.table, reads.starts, reads.ends, cap=cap, interpret=interpret)
    return merged([found, attend_tail(query, tail, index, window, cap)], sink)


def _attend_pages(
    query: jax.Array,
    pages: jax.Array,
    table: jax.Array,
    starts: jax.Array,
    ends: jax.Array,
    *,
    cap: float | None,
    interpret: bool,
) -> SoftmaxParts:
    (rows, heads, size), (_, kv_heads, page_length, width) = query.shape, pages.shape
    groups = heads // kv_heads
    padded = -(-groups // LEAST_ROWS) * LEAST_ROWS
    # A head of 64 fills half of the lanes: zeros in the query take the place of a slice of keys.
    wide = size if size % LANES == 0 else width
    query = query.astype(pages.dtype).reshape(rows, kv_heads, groups, size)
    query = jnp.pad(query, ((0, 0), (0, 0), (0, padded - groups), (0, wide - size)))

    def of_row(last: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, kv_heads, padded, last), lambda row, *_: (row, 0, 0, 0))

    fitting = BUFFER // (2 * kv_heads * width * pages.dtype.itemsize)
    at_once = max(min(BLOCK, fitting) // page_length, 1)
    weighted, total, highest = pl.pallas_call(
        functools.partial(_kernel, scale=size**-0.5, cap=cap, row_pages=table.shape[1]),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(rows,),
            in_specs=[of_row(wide), pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=[of_row(wide), of_row(LANES), of_row(LANES)],
            scratch_shapes=[
                pltpu.VMEM((2, at_once, *pages.shape[1:]), pages.dtype),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SMEM((1,), jnp.int32),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct((rows, kv_heads, padded, last), jnp.float32) for last in (wide, LANES, LANES)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="paged_attention",
    )(table.reshape(-1), starts, ends, query, pages)

    def of_heads(x: jax.Array) -> jax.Array:
        return x[:, :, :groups].reshape(rows, heads, x.shape[-1])

    return SoftmaxParts(of_heads(weighted)[..., -size:], of_heads(total)[..., 0], of_heads(highest)[..., 0])


def _kernel(
    table_ref,
    starts_ref,
    ends_ref,
    query_ref,
    pages_ref,
    weighted_ref,
    total_ref,
    highest_ref,
    buffer,
    arrived,
    current,
    *,
    scale,
    cap,
    row_pages,
):
    """One row. `current` is the half of `buffer` that the next block arrives in, or has arrived in."""
    row, rows = pl.program_id(0), pl.num_programs(0)
    _, at_once, kv_heads, page_length, width = buffer.shape
    block = at_once * page_length
    start, end = starts_ref[row], ends_ref[row]

    def each_page(row, number, half, act):
        def copy(place, _):
            page = table_ref[row * row_pages + number * at_once + place]
            act(pltpu.make_async_copy(pages_ref.at[page], buffer.at[half, place], arrived.at[half]))
            return 0

        left = pl.cdiv(ends_ref[row], page_length) - number * at_once
        jax.lax.fori_loop(0, jnp.minimum(left, at_once), copy, 0)

    def fetch_first_from(row, half):
        """Begins to copy the first block of the next row that has one."""
        after = jnp.minimum(row, rows - 1)
        found = jax.lax.while_loop(
            lambda row: (row < rows - 1) & (ends_ref[jnp.minimum(row, rows - 1)] == 0), lambda row: row + 1, after
        )

        @pl.when(row < rows)
        def _():
            each_page(found, 0, half, lambda copy: copy.start())

    @pl.when(row == 0)
    def _():
        buffer[...] = jnp.zeros(buffer.shape, buffer.dtype)  # no NaN where nothing is copied to
        current[0] = 0
        fetch_first_from(0, 0)

    num_blocks = pl.cdiv(end, block)

    def step(number, carry):
        half = current[0]

        @pl.when(number + 1 < num_blocks)
        def _():
            each_page(row, number + 1, 1 - half, lambda copy: copy.start())

        @pl.when(number + 1 == num_blocks)
        def _():
            fetch_first_from(row + 1, 1 - half)

        each_page(row, number, half, lambda copy: copy.wait())
        current[0] = 1 - half
        tokens = number * block + jax.lax.broadcasted_iota(jnp.int32, (1, block), 1)
        visible = (tokens >= start) & (tokens < end)
        return tuple(
            _attend_block(query_ref[head], buffer[half, :, head].reshape(block, width), visible, scale, cap, *parts)
            for head, parts in enumerate(carry)
        )

    padded, wide = query_ref.shape[1:]
    nothing = jnp.zeros((padded, wide)), jnp.zeros((padded, 1)), jnp.full((padded, 1), MASKED)
    for head, (weighted, total, highest) in enumerate(jax.lax.fori_loop(0, num_blocks, step, (nothing,) * kv_heads)):
        weighted_ref[head] = weighted
        total_ref[head] = jnp.broadcast_to(total, (padded, LANES))
        highest_ref[head] = jnp.broadcast_to(highest, (padded, LANES))


def _attend_block(query, keys_and_values, visible, scale, cap, weighted, total, highest):
    """The parts of the softmax with those of a block; keys_and_values [T, 2H], visible [1, T]."""
    wide = query.shape[1]
    key, value = keys_and_values[:, :wide], keys_and_values[:, -wide:]
    scores = jnp.where(visible, capped(_product(query, key, ((1,), (1,))) * scale, cap), MASKED)
    new = jnp.maximum(highest, jnp.max(scores, axis=1, keepdims=True))
    weights, kept = jnp.where(visible, jnp.exp(scores - new), 0.0), jnp.exp(highest - new)
    weighted = weighted * kept + _product(weights.astype(value.dtype), value, ((1,), (0,)))
    return weighted, total * kept + jnp.sum(weights, axis=1, keepdims=True), new


def _product(x, y, contracted):
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dimensions = contracted, ((), ())
    return jax.lax.dot_general(x, y, dimensions, precision=precision, preferred_element_type=jnp.float32)
