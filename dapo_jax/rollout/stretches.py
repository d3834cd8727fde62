"""Device: keys and values of each slot's row in one stretch, or its state in layers that have one, for CPUs.

Nothing is gathered while a chunk is decoded: a slot gets a copy of its row's prompt when the row begins. Sizes: A
places of prompts with P tokens each, W tokens of a stretch that follow those of its prompt.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from dapo_jax.models.architecture import Architecture, Layer
from dapo_jax.models.attention import capped, matmul, softmax
from dapo_jax.models.gated_delta import State, empty_state, next_token
from dapo_jax.parallel.sharding import on_mesh
from dapo_jax.rollout.decoding import HEADS, ROWS, Held, OpenedCache, Plan, laid_out, taken


@struct.dataclass
class KeysAndValues:
    """Of one layer."""

    key: jax.Array  # [B, K, H, P + W], or [A, K, H, P] of prompts
    value: jax.Array  # [B, K, P + W, H], or [A, K, P, H]


@struct.dataclass
class Stretches:
    """A `decoding.Cache`."""

    rows: list[Any]  # of each layer, KeysAndValues or State
    prompts: list[Any]

    def with_prompts(self, found: list[Any], places: Any, arch: Architecture) -> "Stretches":
        """With prompts at `places` [Q]; place 0 is scratch."""
        heads, rows = on_mesh((HEADS, ROWS))
        put = jax.shard_map(
            lambda x, new, places: x.at[places].set(new), in_specs=(heads, heads, rows), out_specs=heads
        )
        found = [one if isinstance(one, State) else KeysAndValues(*one) for one in found]
        return Stretches(self.rows, jax.tree.map(lambda held, new: put(held, new, places), self.prompts, found))

    def opened(self, plan: Plan, arch: Architecture) -> OpenedCache:
        width = _width(self.prompts)
        first = width - plan.prompt_lengths  # where each prompt begins

        def attend(moment: Any, kind: Layer, layer: Any, *given: Any) -> Any:
            if kind.delta:
                assert arch.delta is not None
                read, held = next_token(given[0], layer[1], moment[1], arch.delta)
                return read, (None, held)
            (index, _), (query, key, value, sink) = moment, given
            last = width + plan.sampled - 1 + index
            held = KeysAndValues(_write(layer[1].key, key[:, 0], last, 3), _write(layer[1].value, value[:, 0], last, 2))
            return _attend(kind, held, query, first, last, arch, sink), (None, held)

        return OpenedCache([None] * len(self.rows), self.rows, attend, lambda rows: Stretches(rows, self.prompts))


@functools.partial(jax.jit, static_argnames=("arch", "slots", "width", "prompts", "stretch", "dtype"))
def empty_stretches(*, arch: Architecture, slots: int, prompts: int, width: int, stretch: int, dtype: Any) -> Held:
    """Slots without rows, and places for prompts of `width` tokens; both counted on all shards."""

    def layers(number: int, tokens: int) -> list[Any]:
        key = number, arch.num_kv_heads, arch.head_dim, tokens
        value = number, arch.num_kv_heads, tokens, arch.head_dim

        def of_kind(kind: Layer) -> Any:
            if kind.delta:
                assert arch.delta is not None
                return empty_state(number, arch.delta, dtype)
            return KeysAndValues(jnp.zeros(key, dtype), jnp.zeros(value, dtype))

        return [of_kind(kind) for kind in arch.layers]

    cache = Stretches(layers(slots, width + stretch), layers(prompts, width))
    return laid_out(Held(jnp.zeros(slots, jnp.int32), jnp.ones(slots, bool), cache))


def resized(held: Held, sources: jax.Array, *, stretch: int) -> Held:
    """The rows at `sources` [b] among each shard's own slots, any for -1, with room for `stretch` tokens each."""
    rows, prompts = held.cache.rows, held.cache.prompts
    width = _width(prompts) + stretch
    for number, row in enumerate(rows):  # only one layer at a time is in memory twice
        rows[number] = _layer_at(row, sources, width=width)
    tokens, finished = _slots_at(held.tokens, held.finished, sources)
    return Held(tokens, finished, Stretches(rows, prompts))


def begun(held: Held, begins: jax.Array, places: jax.Array) -> Held:
    """The slots, with the prompts at `places` [B] where `begins` [B]."""
    rows = held.cache.rows
    for number, prompts in enumerate(held.cache.prompts):
        rows[number] = _with_prompts(rows[number], prompts, begins, places)
    return held


@jax.jit
def _slots_at(tokens: jax.Array, finished: jax.Array, sources: jax.Array) -> tuple[jax.Array, jax.Array]:
    return taken(tokens, sources), taken(finished, sources)


@functools.partial(jax.jit, static_argnames=("width",))
def _layer_at(layer: Any, sources: jax.Array, *, width: int) -> Any:
    if isinstance(layer, State):
        return laid_out(jax.tree.map(lambda x: taken(x, sources), layer))
    none, more = (0, 0), (0, width - layer.value.shape[2])
    key, value = taken(layer.key, sources), taken(layer.value, sources)
    return laid_out(KeysAndValues(jnp.pad(key, (none, none, none, more)), jnp.pad(value, (none, none, more, none))))


@functools.partial(jax.jit, donate_argnums=(0,))
def _with_prompts(rows: Any, prompts: Any, begins: jax.Array, places: jax.Array) -> Any:
    if isinstance(rows, State):

        def chosen(row: jax.Array, prompt: jax.Array) -> jax.Array:
            return jnp.where(begins.reshape(-1, *[1] * (row.ndim - 1)), taken(prompt, places), row)

        return laid_out(jax.tree.map(chosen, rows, prompts))
    width, new = prompts.value.shape[2], begins[:, None, None, None]
    key, value = taken(prompts.key, places), taken(prompts.value, places)
    key = rows.key.at[..., :width].set(jnp.where(new, key, rows.key[..., :width]))
    value = rows.value.at[:, :, :width].set(jnp.where(new, value, rows.value[:, :, :width]))
    return laid_out(KeysAndValues(key, value))


def _width(prompts: list[Any]) -> int:
    """Tokens of a prompt."""
    return next(one.value.shape[2] for one in prompts if isinstance(one, KeysAndValues))


def _attend(
    kind: Layer,
    held: KeysAndValues,
    query: jax.Array,
    first: jax.Array,
    last: jax.Array,
    arch: Architecture,
    sink: jax.Array | None,
) -> jax.Array:
    """Attention [B, 1, N, H] of each row to places `first` [B] to `last` [B] of its stretch, or to a window."""
    (rows, _, heads, size), places = query.shape, jnp.arange(held.key.shape[3])
    visible = (first[:, None] <= places) & (places <= last[:, None])
    if kind.window is not None:
        visible &= places > last[:, None] - kind.window
    grouped = query.reshape(rows, held.key.shape[1], -1, size)
    scores = capped(matmul("bkgh,bkht->bkgt", grouped, held.key) * size**-0.5, arch.attention_cap)
    weights = softmax(scores, visible[:, None, None], sink)
    return matmul("bkgt,bkth->bkgh", weights, held.value).reshape(rows, 1, heads, size)


def _write(x: jax.Array, new: jax.Array, places: jax.Array, axis: int) -> jax.Array:
    """`x` [B, K, ...] with `new` [B, K, H] at `places` [B] of its tokens, which lie along `axis`."""

    def local(x: jax.Array, new: jax.Array, places: jax.Array) -> jax.Array:
        rows = jnp.arange(len(x))
        return x.at[rows, :, :, places].set(new) if axis == 3 else x.at[rows, :, places].set(new)

    heads, rows = on_mesh((HEADS, ROWS))
    return jax.shard_map(local, in_specs=(heads, heads, rows), out_specs=heads)(x, new, places)
