"""Device: layers whose tokens lie on the devices of the mesh axis "context", each with a part of every sequence.

What tokens do alone, they do where they lie. Attention and recurrences need a whole sequence, and no head needs
another: an all-to-all gives each device all tokens of some heads, and a second one returns the results
(arXiv:2309.14509). So kernels see whole sequences, and all devices have equal work, which a causal mask over parts of
a sequence would not give.

Sizes: B rows, T tokens, C devices along "context", N query heads, K key-value heads, H head size, S shares of the rows.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from dapo_jax.data.containers import Bins
from dapo_jax.models.architecture import Architecture, Delta
from dapo_jax.models.attention import Attend
from dapo_jax.models.gated_delta import Inputs, over_sequences
from dapo_jax.models.token_paths import Paths
from dapo_jax.parallel.mesh import BATCH_AXES, HEAD_AXES
from dapo_jax.parallel.sharding import constrain, context_shards, tensor_shards

TOKENS, HEADS = PartitionSpec(BATCH_AXES, "context", "tensor"), PartitionSpec(BATCH_AXES, None, HEAD_AXES)


def on_all_devices(bins: Bins) -> Bins:
    """Inside jit: what slots hold, whole on each device along "context", wherever XLA would like it divided."""
    if context_shards() == 1:
        return bins
    return jax.tree.map(lambda x: constrain(x, PartitionSpec(BATCH_AXES)), bins)


def across_heads(attend: Attend) -> Attend:
    """Inside jit: `attend` for arrays [B, T, heads, H] whose tokens "context" divides; meanwhile it divides the heads.

    Where there are fewer key-value heads than devices, several have a copy of the same, and where these do not divide
    its query heads, zeros fill up.
    """
    if context_shards() == 1:
        return attend

    def of_heads(query: jax.Array, key: jax.Array, value: jax.Array, sink: jax.Array | None = None) -> jax.Array:
        query, key, value = (constrain(x, TOKENS) for x in (query, key, value))  # so their cotangents lie there too
        kv_heads, groups = key.shape[2], query.shape[2] // key.shape[2]
        copies = math.lcm(kv_heads, tensor_shards() * context_shards()) // kv_heads
        filled = -(-groups // copies) * copies
        if copies > 1:
            key, value = (jnp.repeat(x, copies, axis=2) for x in (key, value))
            query = _regrouped(query, 2, kv_heads, groups, filled)
            sink = None if sink is None else _regrouped(sink, 0, kv_heads, groups, filled)
            query, key, value = (constrain(x, TOKENS) for x in (query, key, value))
        query, key, value = (constrain(x, HEADS) for x in (query, key, value))
        attended = attend(query, key, value, sink).astype(query.dtype)  # as the next product takes it
        attended = constrain(constrain(attended, HEADS), TOKENS)
        return _regrouped(attended, 2, kv_heads, filled, groups).astype(jnp.float32)

    return of_heads


def _regrouped(x: jax.Array, axis: int, kv_heads: int, groups: int, new: int) -> jax.Array:
    """`x` with `new` query heads along `axis` for each key-value head instead of `groups`: zeros added, or some cut."""
    if groups == new:
        return x
    by_group = x.reshape(*x.shape[:axis], kv_heads, groups, *x.shape[axis + 1 :])
    if new < groups:
        by_group = jax.lax.slice_in_dim(by_group, 0, new, axis=axis + 1)
    else:
        by_group = jnp.pad(by_group, [(0, (new - groups) * (i == axis + 1)) for i in range(by_group.ndim)])
    return by_group.reshape(*x.shape[:axis], kv_heads * new, *x.shape[axis + 1 :])


def undivided(arch: Architecture, tensor: int, context: int) -> str:
    """The heads of a model that these axes do not divide, as in "the 6 key heads"; empty if they divide all."""
    if context > 1 and arch.delta is not None and arch.delta.key_heads % (tensor * context):
        return f"the {arch.delta.key_heads} key heads of linear attention"
    return ""


def over_divided_sequences(inputs: Inputs, paths: Paths, delta: Delta) -> jax.Array:
    """Inside jit: what tokens read by `over_sequences`, where "context" divides tokens, and meanwhile the heads."""
    if context_shards() == 1:
        return over_sequences(inputs, paths, delta)[0]
    parts, keys = context_shards() * tensor_shards(), delta.key_heads * delta.key_dim
    own = dataclasses.replace(delta, key_heads=delta.key_heads // parts, value_heads=delta.value_heads // parts)

    def by_heads(channels: jax.Array) -> jax.Array:
        """[..., M] -> [..., devices, M // devices], the queries, keys and values of the heads of each device."""
        kinds = jnp.split(channels, [keys, 2 * keys], axis=-1)
        return jnp.concatenate([x.reshape(*x.shape[:-1], parts, -1) for x in kinds], axis=-1)

    def of_part(channels: jax.Array, kernel: jax.Array, beta: jax.Array, decay: jax.Array, paths: Paths) -> jax.Array:
        return over_sequences(Inputs(channels[:, :, 0], kernel[:, 0].T, beta, decay), paths, own)[0]

    mesh = jax.sharding.get_abstract_mesh()
    axes = set(mesh.axis_names) - set(mesh.manual_axes)  # all: XLA aborts on gathers in a shard_map over a part
    rows = tuple(axis for axis in BATCH_AXES if axis in axes)
    heads = PartitionSpec(rows, None, HEAD_AXES)
    divided = jax.shard_map(
        of_part,
        in_specs=(heads, PartitionSpec(None, HEAD_AXES), heads, heads, PartitionSpec(rows)),
        out_specs=heads,
        axis_names=axes,
        check_vma=False,
    )
    tokens = by_heads(inputs.channels), inputs.beta, inputs.decay
    channels, beta, decay = (constrain(x, TOKENS) for x in tokens)  # so their cotangents lie there too
    return constrain(divided(channels, by_heads(inputs.filter.T), beta, decay, paths), TOKENS)


def by_parts(hidden: jax.Array, shares: int) -> jax.Array:
    """Inside jit: [B, T, D] -> [S * C, B // S * T // C, D], the slots of each share that lie on each device."""
    (rows, length, size), parts = hidden.shape, context_shards()
    if parts == 1:
        return hidden.reshape(shares, -1, size)
    slots = hidden.reshape(shares, rows // shares, parts, length // parts, size).swapaxes(1, 2)
    return constrain(slots.reshape(shares * parts, -1, size), PartitionSpec((*BATCH_AXES, "context")))
