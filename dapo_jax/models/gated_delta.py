"""Device: linear attention by a gated delta rule (arXiv:2412.06464), as Qwen3-Next and Qwen3.5 have it.

Each value head has a state S [I, J]. A token with query q, key k and value v, all behind a short convolution, makes it
forget and corrects what it reads at k: S <- exp(decay) S, then S <- S + beta k (v - S' k)'. What it reads is S' q.
Whole sequences take chunks of C tokens (arXiv:2406.06484): inside, products of C x C, and from chunk to chunk a scan.

Sizes: B rows, T tokens, D hidden, K key heads, V value heads, I and J the sizes of keys and values, W the convolution's
width, M = 2 K I + V J channels, N = T // C chunks.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from dapo_jax.models.architecture import Architecture, Delta
from dapo_jax.models.attention import matmul
from dapo_jax.models.lora import adapted
from dapo_jax.models.token_paths import CHUNK, Paths
from dapo_jax.parallel.ordered_sums import rows_along

Params = dict[str, Any]
EPSILON = 1e-6  # added to the squared length of queries and keys


class Inputs(NamedTuple):
    """What a layer's recurrence takes."""

    channels: jax.Array  # [B, T, M] queries, keys and values before the convolution, in the dtype of products
    filter: jax.Array  # [M, W] float32, of the oldest token first
    beta: jax.Array  # [B, T, V] float32
    decay: jax.Array  # [B, T, V] float32, the logarithm of what is kept


@struct.dataclass
class State:
    """What a layer keeps of the tokens of each row."""

    tail: jax.Array  # [B, (W - 1) * M] channels of the last tokens, the oldest first, in the dtype of products
    state: jax.Array  # [B, V, I, J] float32


def empty_state(rows: int, delta: Delta, dtype: Any) -> State:
    """Of rows without tokens."""
    tail = jnp.zeros((rows, delta.tail_size), dtype)
    return State(tail, jnp.zeros((rows, delta.value_heads, delta.key_dim, delta.value_dim), jnp.float32))


def state_bytes(delta: Delta, dtype: Any) -> float:
    """Of a row in one layer."""
    shapes = jax.eval_shape(lambda: empty_state(1, delta, dtype))
    return float(sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes)))


def gated_delta(
    x: jax.Array, layer: Params, recur: Callable[[Inputs], tuple[jax.Array, Any]], arch: Architecture
) -> tuple[jax.Array, Any]:
    """What such a layer adds to the residual stream: [B, T, D] -> [B, T, D] float32, and the cache of `recur`.

    Args:
        recur: `Inputs` -> (what is read [B, T, V, J] float32, cache), such as `over_sequences` or `next_token`.
    """
    channels = adapted("btd,dm->btm", x, layer, "delta_mixed").astype(layer["delta_mixed"].dtype)
    beta = jax.nn.sigmoid(adapted("btd,dv->btv", x, layer, "delta_beta"))
    rate = jax.nn.softplus(adapted("btd,dv->btv", x, layer, "delta_decay") + layer["delta_decay_bias"])
    read, cache = recur(Inputs(channels, layer["delta_filter"], beta, -jnp.exp(layer["delta_rate"]) * rate))
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(read), axis=-1, keepdims=True) + arch.rms_norm_eps)
    gate = jax.nn.silu(adapted("btd,dvj->btvj", x, layer, "delta_gate"))
    return adapted("btvj,vjd->btd", read * scale * layer["delta_norm"] * gate, layer, "delta_output"), cache


def update_states(
    state: jax.Array, query: jax.Array, key: jax.Array, value: jax.Array, kept: jax.Array, beta: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """What a token of each row reads [B, V, J], and the states [B, V, I, J] with it; all is float32.

    Both products with the state are with the old one, S' k and S' q: then it is read once for them, and once to change
    it. The barrier keeps XLA from computing keys and queries in each product again, which would read it three times.

    Args:
        query, key: [B, V, I].
        value: [B, V, J].
        kept, beta: [B, V], the share of the state that is kept, and of the correction that is made.
    """
    query, key, value = jax.lax.optimization_barrier((query, key, value))
    at_key, at_query = (jnp.sum(state * x[..., None], axis=-2) for x in (key, query))
    kept = kept[..., None]
    change = beta[..., None] * (value - kept * at_key)
    read = kept * at_query + jnp.sum(key * query, axis=-1, keepdims=True) * change
    return read, kept[..., None] * state + key[..., None] * change[..., None, :]


def next_token(
    inputs: Inputs,
    held: State,
    alive: jax.Array,
    delta: Delta,
    update: Callable[..., tuple[jax.Array, jax.Array]] = update_states,
) -> tuple[jax.Array, State]:
    """One token of each row: what is read [B, 1, V, J], and the state with it where `alive` [B]; else as it was.

    Args:
        held: of these rows; with the `update` of a kernel, its `state` has all places of the pool.
        update: takes and returns `held.state`, as `update_states` does.
    """
    rows, _, channels = inputs.channels.shape
    seen = jnp.concatenate([held.tail.reshape(rows, -1, channels), inputs.channels], axis=1)
    mixed = jax.nn.silu(jnp.sum(seen * inputs.filter.T, axis=1, dtype=jnp.float32))
    heads = (x.astype(jnp.float32) for x in _heads(mixed, delta, inputs.channels.dtype))
    decay, beta = (jnp.where(alive[:, None], x[:, 0], 0) for x in (inputs.decay, inputs.beta))
    read, state = update(held.state, *heads, jnp.exp(decay), beta)
    tail = jnp.where(alive[:, None], seen[:, 1:].reshape(rows, -1), held.tail)
    return read[:, None], State(tail, state)


def over_sequences(inputs: Inputs, paths: Paths, delta: Delta) -> tuple[jax.Array, jax.Array]:
    """What each token reads [B, T, V, J], in chunks, and the state [B, V, I, J] after the last slot."""
    rows, length, _ = inputs.channels.shape
    chunks = paths.visible.shape[1]

    def divided(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, 0), (0, chunks * CHUNK - length), *[(0, 0)] * (x.ndim - 2)))
        return x.reshape(rows, chunks, CHUNK, *x.shape[2:])

    real = paths.real[..., None]
    beta, decay = (jnp.where(real, divided(x), 0) for x in (inputs.beta, inputs.decay))
    mixed = _convolved(divided(inputs.channels), inputs.filter, paths)
    query, key, value = _heads(mixed, delta, inputs.channels.dtype)
    read, state = _by_chunks(query, key, value, beta, decay, paths)
    return read.reshape(rows, -1, *read.shape[3:])[:, :length], state


def last_tail(channels: jax.Array, mask: jax.Array, width: int) -> jax.Array:
    """`State.tail` of left-padded rows [B, T, M]; mask [B, T] bool."""
    kept = jnp.where(mask[..., None], channels, 0)
    kept = jnp.pad(kept, ((0, 0), (width - 1, 0), (0, 0)))[:, -(width - 1) :]
    return kept.reshape(len(kept), -1)


def _heads(mixed: jax.Array, delta: Delta, dtype: Any) -> tuple[jax.Array, ...]:
    """Queries and keys [..., V, I] of length 1 / sqrt(I) and 1, and values [..., V, J], from channels [..., M]."""
    keys = delta.key_heads * delta.key_dim
    query, key, value = jnp.split(mixed, [keys, 2 * keys], axis=-1)
    query, key = (x.reshape(*x.shape[:-1], delta.key_heads, delta.key_dim) for x in (query, key))
    query, key = (x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + EPSILON) for x in (query, key))
    groups = delta.value_heads // delta.key_heads
    query, key = (jnp.repeat(x, groups, axis=-2) for x in (query * delta.key_dim**-0.5, key))
    value = value.reshape(*value.shape[:-1], delta.value_heads, delta.value_dim)
    return tuple(x.astype(dtype) for x in (query, key, value))


def _convolved(channels: jax.Array, kernel: jax.Array, paths: Paths) -> jax.Array:
    """Channels [B, N, C, M] of each token and the W - 1 before it on its path, weighted and summed; float32.

    Tokens are picked by products with zeros and ones, whose gradient needs no scatter.
    """
    rows, chunks, _, size = channels.shape
    flat, before = channels.reshape(rows, -1, size), jnp.maximum(paths.before, 0)
    before = rows_along(flat, before.reshape(rows, -1)).reshape(rows, chunks, -1, size)
    there = jnp.concatenate([before, channels], axis=2)
    total = channels * kernel[:, -1]
    for distance in range(1, kernel.shape[1]):
        picked = paths.ancestors[..., distance - 1, None] == paths.slots[:, :, None]
        past = matmul("bnij,bnjm->bnim", picked.astype(there.dtype), there)
        total += past * kernel[:, -1 - distance]
    return jax.nn.silu(total)


def _by_chunks(
    query: jax.Array, key: jax.Array, value: jax.Array, beta: jax.Array, decay: jax.Array, paths: Paths
) -> tuple[jax.Array, jax.Array]:
    """What tokens read [B, N, C, V, J], and the last state, of arrays [B, N, C, V, ...].

    A token corrects the state by u with u + A u = beta (v - what it would read without its chunk), where A has the
    decayed products of its key with those before it.
    """
    query, key, value = (x.swapaxes(2, 3) for x in (query, key, value))  # CPUs multiply bfloat16 only behind batches
    beta = beta.swapaxes(2, 3)
    total = _sums(paths.visible, decay)  # of what each token has forgotten since its chunk began
    ratio = _ratios(paths.visible, total, total)
    before = ratio * ~jnp.eye(CHUNK, dtype=bool)
    system = before * matmul("bnvik,bnvjk->bnvij", key, key) * beta[..., None]
    ends = _sums(paths.ends, decay)
    of_chunks = {
        "inverse": _inverse_of_one_plus(system),
        "scores": ratio * matmul("bnvik,bnvjk->bnvij", query, key),
        "kept": jnp.exp(total),  # of the state that a token begins with
        "to_ends": _ratios(paths.ends, ends, total),
        "flows": jnp.exp(ends)[..., None] * paths.flows[:, :, None],
        "sources": paths.sources,
        "beta": beta,
        "query": query,
        "key": key,
        "value": value,
    }
    (rows, _, heads, _, keys), values = key.shape, value.shape[-1]

    @jax.checkpoint
    def step(states: jax.Array, chunk: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        of_tokens = jnp.concatenate([chunk["key"], chunk["query"]], axis=2)
        known = matmul("bvks,bvik->bvis", states.reshape(rows, heads, keys, -1), of_tokens)
        known = known.reshape(rows, heads, 2, CHUNK, 2, values)  # by keys and queries, from either state
        begun = chunk["sources"][:, None, None, :, :, None]
        at_key, at_query = jnp.moveaxis(jnp.sum(jnp.where(begun, known, 0), axis=-2), 2, 0)
        kept, beta, key = chunk["kept"][..., None], chunk["beta"][..., None], chunk["key"]
        wanted = (beta * (chunk["value"] - kept * at_key)).astype(key.dtype)
        change = matmul("bvij,bvjo->bvio", chunk["inverse"], wanted)
        read = kept * at_query + matmul("bvij,bvjo->bvio", chunk["scores"], change.astype(key.dtype))
        at_ends = chunk["to_ends"].swapaxes(2, 3)[..., None] * change[:, :, :, None]
        added = matmul("bvis,bvik->bvks", at_ends.reshape(rows, heads, CHUNK, -1), key)
        flowed = jnp.einsum("bves,bvkso->bvkeo", chunk["flows"], states, precision="highest")
        return flowed + added.reshape(states.shape), read

    states = jnp.zeros((rows, heads, keys, 2, values), jnp.float32)
    states, read = jax.lax.scan(step, states, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), of_chunks))
    return jnp.moveaxis(read, 0, 1).swapaxes(2, 3), states[..., 0, :]


def _sums(tokens: jax.Array, decay: jax.Array) -> jax.Array:
    """Sums [B, N, V, i] of decays [B, N, C, V] over `tokens` [B, N, i, C] bool."""
    return jnp.einsum("bnij,bnjv->bnvi", tokens.astype(jnp.float32), decay, precision="highest")


def _ratios(tokens: jax.Array, until: jax.Array, since: jax.Array) -> jax.Array:
    """What is kept [B, N, V, i, C] between two of the sums `until` [B, N, V, i] and `since` [B, N, V, C]; else 0."""
    there = tokens[:, :, None]
    return jnp.where(there, jnp.exp(jnp.where(there, until[..., None] - since[..., None, :], 0)), 0)


def _inverse_of_one_plus(system: jax.Array) -> jax.Array:
    """(1 + A)^-1 of strictly lower triangles [..., C, C], by blocks that double: as exact as forward substitution."""
    place = jnp.arange(CHUNK)
    inverse, size = jnp.eye(CHUNK) - jnp.where(_lower_block(place, 1), system, 0), 2
    while size < CHUNK:
        block = jnp.where(_lower_block(place, size), system, 0)
        inverse = inverse - _product(_product(inverse, block), inverse)
        size *= 2
    return inverse


def _lower_block(place: jax.Array, size: int) -> jax.Array:
    """[C, C] bool: in pairs of blocks of this size, the rows of the second and the columns of the first."""
    block = place // size
    return (block[:, None] == block + 1) & (block[:, None] % 2 == 1)


def _product(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.matmul(x, y, precision="highest")
