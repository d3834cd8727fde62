"""Device: what comes before each token of a bin, for layers that go from token to token.

The path of a token in a response has its prompt's tokens, then the response's up to itself; padding is on none. Chunks
cut a bin into equal parts, wherever sequences begin. Two states go from chunk to chunk: that after the last token, and
that after the prompt of its tree, from which later responses go on.

Sizes: B bins, T slots, C slots of a chunk, N chunks, W tokens that a convolution sees.
"""

import jax
import jax.numpy as jnp
from flax import struct

CHUNK = 64


@struct.dataclass
class Paths:
    """Of each chunk [B, N, ...]. A slot is numbered in its bin; -1 = none."""

    real: jax.Array  # [B, N, C] bool, no padding
    visible: jax.Array  # [B, N, C, C] bool, the tokens of the chunk on the path of each token, itself included
    ancestors: jax.Array  # [B, N, C, W - 1] int32, the slots of the tokens before it, the nearest first
    before: jax.Array  # [B, N, 2 (W - 1)] int32, slots of earlier chunks among these; -2 = none
    slots: jax.Array  # [B, N, 2 (W - 1) + C] int32, these and the chunk's own
    sources: jax.Array  # [B, N, C, 2] bool, which of the two states a token goes on from; neither = its tree begins
    ends: jax.Array  # [B, N, 2, C] bool, the tokens of the chunk on the paths of the two states after it ...
    flows: jax.Array  # [B, N, 2, 2] bool, ... and which of those before it they go on from


def paths_of(trees: jax.Array, branches: jax.Array, width: int) -> Paths:
    """The paths of bins, `trees` and `branches` [B, T] as in `Bins`; padding may lie anywhere.

    Args:
        width: W, at least 2.
    """
    missing = -trees.shape[1] % CHUNK
    trees, branches = (jnp.pad(x, ((0, 0), (0, missing))) for x in (trees, branches))
    real, slot = trees > 0, jnp.arange(trees.shape[1])
    last = jax.lax.cummax(jnp.where(real, slot, -1), axis=1)  # padding goes on with the token before it
    trees, branches = (_at(x, last, 0) for x in (trees, branches))
    ancestors, of_prompt = _ancestors(trees, branches, real, width)

    def chunks(x: jax.Array) -> jax.Array:
        return x.reshape(len(x), -1, CHUNK, *x.shape[2:])

    def ahead(x: jax.Array, none: int) -> jax.Array:
        """[B, N, 1, ...]: of the slot before each chunk."""
        ends = jnp.roll(chunks(x)[:, :, -1], 1, axis=1).at[:, 0].set(none)
        return ends[:, :, None]

    tree, branch, is_real = chunks(trees), chunks(branches), chunks(real)
    same = (tree > 0) & (tree == ahead(trees, 0))
    onward = same & ((branch == ahead(branches, 0)) | (ahead(branches, 0) == 0))
    sources = jnp.stack([onward, same & ~onward], axis=-1)
    visible = _visible(tree, branch, tree, branch) & jnp.tri(CHUNK, dtype=bool) & is_real[:, :, None]
    prompt = _visible(tree[:, :, -1:], jnp.zeros_like(branch[:, :, -1:]), tree, branch) & is_real[:, :, None]
    in_prompt = same[:, :, -1] & (ahead(branches, 0)[:, :, 0] == 0)
    of_end = jnp.stack([in_prompt, same[:, :, -1] & ~in_prompt], axis=-1)
    own = jnp.concatenate([last[..., None], ancestors[..., :-1]], axis=-1)  # the last W - 1 tokens, with the slot's
    own, of_prompt = ahead(own, -1)[:, :, 0], ahead(of_prompt, -1)[:, :, 0]
    of_prompt = jnp.where((of_prompt[..., None] == own[..., None, :]).any(axis=-1), -1, of_prompt)
    before = jnp.concatenate([own, of_prompt], axis=-1)
    before = jnp.where(before < 0, -2, before)
    return Paths(
        real=is_real,
        visible=visible,
        ancestors=chunks(ancestors),
        before=before,
        slots=jnp.concatenate([before, jnp.broadcast_to(chunks(slot[None]), tree.shape)], axis=-1),
        sources=sources,
        ends=jnp.concatenate([visible[:, :, -1:], prompt], axis=2),
        flows=jnp.stack([sources[:, :, -1], of_end], axis=2),
    )


def _visible(tree: jax.Array, branch: jax.Array, of_tree: jax.Array, of_branch: jax.Array) -> jax.Array:
    """[B, N, i, C]: slots of the same tree, in its prompt or in the same branch."""
    in_path = (of_branch[:, :, None] == 0) | (of_branch[:, :, None] == branch[..., None])
    return (tree[..., None] == of_tree[:, :, None]) & in_path


def _ancestors(trees: jax.Array, branches: jax.Array, real: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
    """[B, T, W - 1] slots of the tokens before each on its path, and of the last of its prompt if it is in a response.

    Padding has what the token before it has.
    """
    rank = jnp.cumsum(real, axis=1) - 1  # of each token among those of the bin
    slot_of = jnp.argsort(~real, axis=1, stable=True)
    before = (jnp.pad(x, ((0, 0), (1, 0)))[:, :-1] for x in (trees, branches))
    new_tree, new_branch = (x != y for x, y in zip((trees, branches), before, strict=True))

    def since(begins: jax.Array) -> jax.Array:
        return jax.lax.cummax(jnp.where(begins, rank, 0), axis=1)

    begin = since(new_tree | new_branch)
    answered = branches > 0
    first = since(answered & (new_tree | (new_branch & ~jnp.pad(answered, ((0, 0), (1, 0)))[:, :-1])))
    distance = jnp.arange(width - 1)
    near, far = (rank - 1)[..., None] - distance, (first - 1)[..., None] - distance  # in the segment; in its prompt
    over = jnp.where(answered[..., None], first[..., None] - (begin[..., None] - near), -1)
    tree_begin = since(new_tree)[..., None]
    near = jnp.where(near >= begin[..., None], near, jnp.where(over >= tree_begin, over, -1))
    far = jnp.where(answered[..., None] & (far >= tree_begin), far, -1)
    return _at(slot_of, near, -1), _at(slot_of, far, -1)


def _at(x: jax.Array, places: jax.Array, none: int) -> jax.Array:
    """Of each row of `x` [B, T] the numbers at `places` [B, ...], `none` for negative ones."""
    found = jnp.take_along_axis(x, jnp.maximum(places, 0).reshape(len(x), -1), axis=1)
    return jnp.where(places < 0, none, found.reshape(places.shape))
