"""Device: the experts of a mesh axis, whose devices gather each other's tokens and exchange the results.

Each device gathers the tokens of all devices along "expert", computes what they want of its own experts, and returns
to each device the sums of its tokens. How many rows that are depends on the routers: blocks of rows are computed as
long as there are some, so no token is dropped, and memory is that of even routers. The backward pass gathers again.

Sizes: S tokens of a device, A of all along "expert", D hidden, k experts of a token, E experts of a device, M rows of
a block.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

AXIS = "expert"
MARGIN = 1.5  # rows of a block, as a multiple of those that a device has with even routers
WHOLE, MULTIPLE = 4096, 128  # so few rows are one block; else it has a multiple
Compute = Callable[[jax.Array, jax.Array, Any, jax.Array], jax.Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def exchanged(
    compute: Compute, shards: int, x: jax.Array, weights: jax.Array, chosen: jax.Array, first: jax.Array, matrices: Any
) -> Any:
    """Inside a shard_map: [S, D] float32, for each token the sum over those of its experts that are in this group.

    Args:
        compute: (rows [M, D] float32, weights [M], matrices, sizes [E]) -> [M, D] float32: rows sorted by expert times
            its matrices, and times their weights. What it has after the last group does not count.
        shards: devices that share all experts.
        x: [S, D] float32, sent in the dtype of the matrices.
        weights: [S, k] float32, of each choice.
        chosen: [S, k] int32, of all experts.
        first: the number of this device's first expert.
        matrices: a tuple of what this device's experts have, each [E, ...].
    """
    return _forward(compute, shards, x, weights, chosen, first, matrices)[0]


def _forward(compute, shards, x, weights, chosen, first, matrices):
    dtype = matrices[0].dtype
    tokens, all_weights, choices = map(_gathered, (x.astype(dtype), weights, chosen))

    def add(block: "_Block", sums: jax.Array) -> jax.Array:
        rows = tokens[block.tokens].astype(jnp.float32)
        return sums + block.sums(compute(rows, all_weights.reshape(-1)[block.choices], matrices, block.sizes))

    sums = _over_blocks(add, jnp.zeros(tokens.shape, jnp.float32), choices - first, len(matrices[0]), shards)
    return _returned(sums), (x, weights, chosen, first, matrices)


def _backward(compute, shards, saved, cotangent):
    x, weights, chosen, first, matrices = saved
    dtype = matrices[0].dtype  # that of the products, which round their operands to it
    given = x.astype(dtype), weights, chosen, cotangent.astype(dtype)
    tokens, all_weights, choices, cotangents = map(_gathered, given)

    def add(block: "_Block", sums: Any) -> Any:
        rows, of_rows = (of[block.tokens].astype(jnp.float32) for of in (tokens, cotangents))
        taken = all_weights.reshape(-1)[block.choices]
        _, pull_back = jax.vjp(lambda *given: compute(*given, block.sizes), rows, taken, matrices)
        to_rows, to_weights, to_matrices = pull_back(of_rows)
        new = block.sums(to_rows), block.of_choices(to_weights), to_matrices
        return jax.tree.map(jnp.add, sums, new)

    empty = jnp.zeros(tokens.shape, jnp.float32), jnp.zeros_like(all_weights), jax.tree.map(jnp.zeros_like, matrices)
    to_x, to_weights, to_matrices = _over_blocks(add, empty, choices - first, len(matrices[0]), shards)
    return _returned(to_x).astype(x.dtype), _returned(to_weights), None, None, to_matrices


exchanged.defvjp(_forward, _backward)


class _Block(NamedTuple):
    """M of the rows sorted by expert."""

    choices: jax.Array  # [M] of each row, its choice in 0..A*k
    places: jax.Array  # [A, k] of each choice, its row; negative, or M and more: not in this block
    sizes: jax.Array  # [E] rows of each expert

    @property
    def tokens(self) -> jax.Array:
        return self.choices // self.places.shape[1]

    def sums(self, rows: jax.Array) -> jax.Array:
        """[A, D]: the sums over each token's rows in this block, of `rows` [M, D]."""
        return self.of_choices(rows).sum(axis=1)

    def of_choices(self, rows: jax.Array) -> jax.Array:
        """[A, k, ...]: the rows [M, ...] of choices, zeros for those that are not in this block."""
        inside = (self.places >= 0) & (self.places < self.sizes.sum())
        found = rows[jnp.where(inside, self.places, 0)]
        return jnp.where(inside.reshape(*inside.shape, *[1] * (rows.ndim - 1)), found, 0)


def _over_blocks(add: Callable[[_Block, Any], Any], sums: Any, choices: jax.Array, experts: int, shards: int) -> Any:
    """`sums` after `add` of each block of the choices [A, k] of one of this device's `experts`, which count from 0."""
    order, places, sizes = sorted_choices(choices, experts)
    ends, rows = jnp.cumsum(sizes), block_rows(choices.size, shards)
    order = jnp.pad(order, (0, rows))

    def step(state: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        start, sums = state
        until = jnp.clip(ends, start, start + rows)
        block = _Block(
            lax.dynamic_slice_in_dim(order, start, rows), places - start, jnp.diff(until, prepend=start[None])
        )
        return start + rows, add(block, sums)

    start = jnp.zeros((), jnp.int32), sums
    if rows == choices.size:
        return step(start)[1]
    return lax.while_loop(lambda state: state[0] < ends[-1], step, start)[1]


def block_rows(choices: int, shards: int) -> int:
    """Rows of a block, of so many choices of the tokens of all devices along "expert"."""
    if choices <= WHOLE:
        return choices
    return min(-(-int(MARGIN * choices) // (shards * MULTIPLE)) * MULTIPLE, choices)


def sorted_choices(chosen: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Choices [..., k] by expert, those of no expert from 0 to `num_experts` at the end.

    Returns:
        the choice [S * k] of each sorted row, the sorted row [S, k] of each choice, and each expert's rows.
    """
    choices = chosen.reshape(-1)
    choices = jnp.where((choices >= 0) & (choices < num_experts), choices, num_experts)
    order = jnp.argsort(choices)
    sizes = jnp.sum(choices[:, None] == jnp.arange(num_experts), axis=0, dtype=jnp.int32)
    return order, jnp.argsort(order).reshape(-1, chosen.shape[-1]), sizes


def _gathered(x: jax.Array) -> jax.Array:
    """[A, ...] of all devices along the axis, from each one's [S, ...]."""
    return lax.all_gather(x, AXIS, tiled=True)


def _returned(sums: jax.Array) -> jax.Array:
    """[S, ...]: the sums over the devices along the axis of their [A, ...], for this device's own tokens."""
    size = lax.axis_size(AXIS)
    parts = lax.all_to_all(sums.reshape(size, -1, *sums.shape[1:]), AXIS, split_axis=0, concat_axis=0)
    return parts.sum(axis=0)
