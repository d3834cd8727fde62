"""Device: keys and values in pages, which a kernel reads where they lie, and states of layers that have them instead.

Sizes: A pages of C tokens, M pages that a row has at most; pages are numbered on each shard of the batch, and page 0 of
a shard is a scratch page. Layers with a window have fewer pages, R of a row: those that the window reaches from a
chunk (shards.py). The tokens of a chunk go to a tail, which becomes a page in the end, or a part of one.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import PartitionSpec

from dapo_jax.models.architecture import Architecture, Layer
from dapo_jax.models.gated_delta import Inputs, State, empty_state, next_token, update_states
from dapo_jax.models.paged_attention import AttendPages, Reads, Runs, most_together
from dapo_jax.models.state_kernels import UpdatePlaces
from dapo_jax.parallel.sharding import constrain, on_mesh
from dapo_jax.rollout.counting import RowStates
from dapo_jax.rollout.decoding import (
    HEADS,
    ROWS,
    Held,
    OpenedCache,
    Plan,
    Reading,
    laid_out,
    taken,
)
from dapo_jax.rollout.layout import SCRATCH_STATE
from dapo_jax.rollout.page_writes import as_pages, put, put_chunk

LEAST_TAIL = 16  # tokens of a tail that a kernel takes


@struct.dataclass
class Pages:
    """A `decoding.Cache`."""

    # [A, K, C, 2H] of each, see models/paged_attention.py; fewer pages of layers with a window. Of those with linear
    # attention a `State` [S, ...], at the places of layout.Layout
    layers: list[Any]
    chunk: int = struct.field(pytree_node=False)  # tokens
    attend: AttendPages = struct.field(pytree_node=False)
    update: UpdatePlaces | None = struct.field(pytree_node=False)  # of states, where a kernel fits

    def with_prompts(self, found: list[Any], places: Any, arch: Architecture) -> "Pages":
        """With prompts of whole pages at `places`, of layers without a window [Q, P // C] and with one [Q, at most R].

        The latter are for a prompt's end; then the places [Q] of states. All are 0 where there is only padding.
        """
        layers = []
        for kind, held, new in zip(arch.layers, self.layers, found, strict=True):
            if kind.delta:
                layers.append(jax.tree.map(lambda x, y: put(x, y, places[2]), held, new))
                continue
            key, value = new
            of_kind = places[0] if kind.window is None else places[1]
            columns = of_kind.shape[1] * held.shape[2]
            kept = as_pages(key[..., -columns:], value[:, :, -columns:], held.shape[2])
            layers.append(put(held, kept, of_kind.reshape(-1)))
        return self.replace(layers=layers)  # pyright: ignore[reportAttributeAccessIssue]

    def opened(self, plan: Plan, arch: Architecture) -> OpenedCache:
        page_length = next(held.shape[2] for held in self.layers if not isinstance(held, State))
        cached = plan.prompt_lengths - 1  # tokens of the prompt in its pages, which end with the last of them
        starts = -cached % page_length
        ends = jnp.where(plan.numbers < 0, 0, cached + starts + plan.sampled)
        runs = None
        if plan.runs is not None:
            ends_of_prompts = jnp.where(plan.numbers < 0, 0, cached + starts)
            runs = Runs(plan.runs, ends_of_prompts)
        heads, rows = on_mesh((HEADS, ROWS))
        spec = heads, heads, heads, PartitionSpec(), rows, PartitionSpec("tensor")

        def attend(moment: Any, kind: Layer, layer: Any, *given: Any) -> Any:
            held, tail = layer
            if kind.delta:
                assert arch.delta is not None
                read, state = next_token(given[0], tail, moment[1], arch.delta, self._update_at(moment[0], plan.states))
                return read, (held, state)
            (index, _), (query, key, value, sink) = moment, given
            new = jnp.concatenate([key, value], axis=-1).swapaxes(1, 2)
            tail = jax.lax.dynamic_update_slice_in_dim(tail, new, index, axis=2)
            reads = Reads(plan.table, starts, ends, runs)
            if kind.window is not None:
                before = plan.windows.first * page_length  # tokens in pages that the table of windows does not have
                first = jnp.maximum(starts, ends + index - kind.window + 1) - before
                reads = Reads(plan.windows.table, first, ends - before)
            of_kind = functools.partial(self.attend, window=kind.window, cap=arch.attention_cap)
            of_shard = jax.shard_map(of_kind, in_specs=spec, out_specs=heads, check_vma=False)
            return of_shard(query[:, 0], held, tail, index, reads, sink)[:, None], (held, tail)

        def after(kind: Layer, held: Any, tail: Any) -> Any:
            if kind.delta:
                return self._closed_state(held, tail, plan.states)
            destinations = plan.destinations if kind.window is None else plan.windows.destinations
            return put_chunk(held, tail[:, :, : self.chunk], destinations, plan.sampled)

        def before(held: Any) -> Any:
            if isinstance(held, State):
                return self._opened_state(held, plan.states)
            return laid_out(self._tail(len(plan.numbers), held))

        def closed(tails: list[Any]) -> Pages:
            layers = [after(*one) for one in zip(arch.layers, self.layers, tails, strict=True)]
            return self.replace(layers=layers)  # pyright: ignore[reportAttributeAccessIssue]

        fixed = [None if isinstance(held, State) else held for held in self.layers]
        return OpenedCache(fixed, [before(held) for held in self.layers], attend, closed)

    def attend_to_read(self, reading: Reading, arch: Architecture) -> Callable[..., Any]:
        """For `transformer.decode` with `layers` as caches: rows are the tokens of chunks.

        A chunk is written before its tokens see it, up to themselves. They read what is before it together, as rows
        with one prompt do. States take one token after the other, as when these are decoded.
        """
        heads, rows = on_mesh((HEADS, ROWS))
        spec = heads, heads, rows, PartitionSpec("tensor")

        def of_shard(
            query: jax.Array, pages: jax.Array, reading: Reading, sink: jax.Array | None, *, window: int | None
        ) -> jax.Array:
            (count, length), (_, kv_heads, page_length, _) = reading.tokens.shape, pages.shape
            is_row, cached = reading.destinations[:, 0] > 0, reading.prompt_lengths - 1
            starts = jnp.where(is_row, -cached % page_length, 0)
            before = jnp.where(is_row, cached + starts + reading.sampled, 0)
            ends = before[:, None] + 1 + is_row[:, None] * jnp.arange(length)  # no row: one token of the scratch page
            each = functools.partial(jnp.repeat, repeats=length, axis=0)
            most = most_together(query.shape[1] // kv_heads, kv_heads)
            runs = Runs(_runs_of_chunks(count, length, most), each(before))
            reads = Reads(each(reading.table), each(starts), ends.reshape(-1), runs)
            if window is not None:
                passed = each(reading.windows.first * page_length)
                first = jnp.maximum(reads.starts, reads.ends - window) - passed
                reads = Reads(each(reading.windows.table), first, reads.ends - passed)
            no_tail = self._tail(count * length, pages)
            return self.attend(query, pages, no_tail, jnp.int32(-1), reads, sink, cap=arch.attention_cap)

        def recur(held: State, inputs: Inputs) -> tuple[jax.Array, State]:
            (count, length), is_row = reading.tokens.shape, reading.destinations[:, 0] > 0
            arrays = inputs.channels, inputs.beta, inputs.decay
            by_token = [x.reshape(count, length, 1, -1).swapaxes(0, 1) for x in arrays]

            def step(state: State, token: Any) -> tuple[State, jax.Array]:
                assert arch.delta is not None
                index, channels, *rates = token
                update = self._update_at(index, reading.states)
                given = Inputs(channels, inputs.filter, *rates)
                read, state = next_token(given, state, is_row, arch.delta, update)
                return state, read

            opened = self._opened_state(held, reading.states)
            state, read = jax.lax.scan(step, opened, (jnp.arange(length), *by_token))
            read = jnp.moveaxis(read, 0, 1).reshape(-1, *read.shape[2:])
            return read, self._closed_state(held, state, reading.states)

        def attend(kind: Layer, held: Any, *given: Any) -> Any:
            if kind.delta:
                return recur(held, *given)
            query, key, value, sink = given
            new = jnp.concatenate([key, value], axis=-1).reshape(*reading.tokens.shape, arch.num_kv_heads, -1)
            new = constrain(new.swapaxes(1, 2), HEADS)
            destinations = reading.destinations if kind.window is None else reading.windows.destinations
            held = put_chunk(held, new, destinations, reading.sampled, reading.follows)
            of_kind = functools.partial(of_shard, window=kind.window)
            sharded = jax.shard_map(of_kind, in_specs=spec, out_specs=heads, check_vma=False)
            return sharded(query[:, 0], held, reading, sink)[:, None], held

        return attend

    def _opened_state(self, held: State, places: RowStates) -> State:
        """What the tokens of a chunk change: the states of the rows, or with a kernel those of the whole pool."""
        state = taken(held.state, places.reads) if self.update is None else held.state
        return State(taken(held.tail, places.reads), state)

    def _update_at(self, index: jax.Array, places: RowStates) -> Callable[..., Any]:
        """How the token at `index` of a chunk changes states: the first one moves them from where rows read them."""
        if self.update is None:
            return update_states
        reads = jnp.where(index == 0, places.reads, places.writes)
        return functools.partial(self.update, reads, jnp.maximum(places.writes, SCRATCH_STATE))

    def _closed_state(self, held: State, changed: State, places: RowStates) -> State:
        """The pool after a chunk."""
        state = put(held.state, changed.state, places.writes) if self.update is None else changed.state
        return State(put(held.tail, changed.tail, places.writes), state)

    def _tail(self, rows: int, pages: jax.Array) -> jax.Array:
        """Tails of `rows` for such pages, in which there is nothing."""
        _, heads, page_length, width = pages.shape
        return jnp.zeros((rows, heads, max(self.chunk, min(LEAST_TAIL, page_length)), width), pages.dtype)


@functools.partial(
    jax.jit,
    static_argnames=(
        "arch",
        "slots",
        "pages",
        "window_pages",
        "states",
        "page_length",
        "chunk",
        "dtype",
        "attend",
        "update",
    ),
)
def empty_pages(
    *,
    arch: Architecture,
    slots: int,
    pages: int,
    window_pages: int,
    states: int,
    page_length: int,
    chunk: int,
    dtype: Any,
    attend: AttendPages,
    update: UpdatePlaces | None,
) -> Held:
    """Slots without rows, pages and places for states that hold nothing; all counted on all shards."""
    shape = arch.num_kv_heads, page_length, 2 * arch.head_dim

    def of_kind(kind: Layer) -> Any:
        if kind.delta:
            assert arch.delta is not None
            return empty_state(states, arch.delta, dtype)
        return jnp.zeros((pages if kind.window is None else window_pages, *shape), dtype)

    cache = Pages([of_kind(kind) for kind in arch.layers], chunk, attend, update)
    return laid_out(Held(jnp.zeros(slots, jnp.int32), jnp.ones(slots, bool), cache))


def _runs_of_chunks(rows: int, length: int, most: int) -> jax.Array:
    """Lengths of runs, if each token of a chunk of some rows is a row."""
    at = np.arange(length, dtype=np.int32)
    return jnp.asarray(np.tile(np.where(at % most == 0, np.minimum(length - at, most), 0), rows))
