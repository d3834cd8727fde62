"""Device: grouped-query attention (arXiv:2305.13245), over whole sequences or in bins.

Sizes: B rows, T query tokens, S keys, N query heads, K key-value heads, G = N // K, H head size. Operands of products
are in the dtype of keys and values, everything else is float32.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from dapo_jax.data.containers import Bins
from dapo_jax.models.remat import ATTENDED

QUERY_BLOCK = 1024  # tokens
MASKED = -1e30  # a finite score, so that a row with nothing to attend to gives no NaN


@dataclass(frozen=True)
class Scores:
    """Which keys a token may see besides the causal mask, and how their scores are capped."""

    window: int | None = None  # tokens that a token attends to, itself included; None: all up to itself
    cap: float | None = None  # cap * tanh(score / cap), after the scale and before the mask; None: not capped

    def within(self, length: int) -> "Scores":
        """The same for sequences of at most `length` tokens, without a window that reaches all of them."""
        reached = self.window is None or self.window >= length
        return Scores(None, self.cap) if reached else self


PLAIN = Scores()


def capped(scores: jax.Array, cap: float | None) -> jax.Array:
    """cap * tanh(score / cap) in float32."""
    return scores if cap is None else cap * jnp.tanh(scores / cap)


def matmul(subscripts: str, x: jax.Array, weight: jax.Array, *, narrow: bool = False) -> jax.Array:
    """einsum with both operands in the dtype of `weight` and a float32 result, in the backward pass too.

    On its own, JAX would widen a bfloat16 operand to float32 and multiply it by the float32 cotangent.
    Each subscript appears in at least two of the three arrays.

    Args:
        narrow: the result, and in the backward pass the cotangent of `x`, have the dtype of `weight`.
    """
    return _matmul(subscripts, narrow, x, weight)


def dot(x: jax.Array, y: jax.Array) -> jax.Array:
    """x @ y, float32; of float32 operands, unrounded."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jax.lax.dot(x, y, precision=precision, preferred_element_type=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _matmul(subscripts: str, narrow: bool, x: jax.Array, weight: jax.Array) -> Any:
    return _product(subscripts, x.astype(weight.dtype), weight, narrow)


def _product(subscripts: str, x: jax.Array, y: jax.Array, narrow: bool = False) -> jax.Array:
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dtype = x.dtype if narrow else jnp.float32
    return jnp.einsum(subscripts, x, y, precision=precision, preferred_element_type=dtype)


def _forward(subscripts: str, narrow: bool, x: jax.Array, weight: jax.Array) -> tuple[jax.Array, Any]:
    rounded = x.astype(weight.dtype)
    return _product(subscripts, rounded, weight, narrow), (rounded, weight, jnp.zeros((), x.dtype))


def _backward(subscripts: str, narrow: bool, saved: Any, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weight, x_like = saved
    inputs, output = subscripts.split("->")
    of_x, of_weight = inputs.split(",")
    # Without the barrier, a CPU recomputes transposed operands for every column of the product.
    cotangent = cotangent.astype(weight.dtype)
    if not narrow:
        x, cotangent = jax.lax.optimization_barrier((x, cotangent))
    to_x = _product(f"{output},{of_weight}->{of_x}", cotangent, weight, narrow)
    to_weight = _product(f"{of_x},{output}->{of_weight}", x, cotangent)
    return to_x.astype(x_like.dtype), to_weight.astype(weight.dtype)


_matmul.defvjp(_forward, _backward)


def causal(length: int, mask: jax.Array, window: int | None = None) -> jax.Array:
    """visible [B, T, T]: token t sees the real tokens up to itself, of the last `window` slots; mask [B, T] bool."""
    visible = mask[:, None, :] & jnp.tril(jnp.ones((length, length), bool))
    return visible if window is None else visible & ~jnp.tri(length, k=-window, dtype=bool)


def softmax(scores: jax.Array, visible: jax.Array, sink: jax.Array | None = None) -> jax.Array:
    """Weights [B, K, G, ..., S] of the keys where `visible`, which broadcasts.

    Args:
        sink: [N] float32, the logit of each head that takes a part of the weight and has no value, so that the others
            add up to less than 1 (gpt-oss, arXiv:2508.10925). Their sum is a sigmoid of what they exceed it by.
    """
    scores = jnp.where(visible, scores, MASKED)
    weights = jax.nn.softmax(scores, axis=-1)
    if sink is None:
        return weights
    together = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    return weights * jax.nn.sigmoid(together - sink.reshape(*scores.shape[1:3], *(1,) * (scores.ndim - 3)))


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    visible: jax.Array,
    cap: float | None = None,
    sink: jax.Array | None = None,
) -> jax.Array:
    """[B, T, N, H] x [B, S, K, H] -> [B, T, N, H] float32; visible [B, T, S] bool; `cap` as in Scores, `sink` [N]."""
    batch, length, heads, size = query.shape
    query = query.reshape(batch, length, key.shape[2], -1, size)
    scores = capped(matmul("btkgh,bskh->bkgts", query, key) * size**-0.5, cap)
    weights = softmax(scores, visible[:, None, None], sink)
    attended = matmul("bkgts,bskh->btkgh", weights, value).reshape(batch, length, heads, size)
    return checkpoint_name(attended, ATTENDED)


def causal_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array,
    scores: Scores = PLAIN,
    sink: jax.Array | None = None,
) -> jax.Array:
    """`attention` of each token to the real tokens up to itself; mask [B, T] bool.

    Long sequences take a block of queries at a time, so that memory grows with the length and not with its square. A
    window counts slots, and a block reads the keys that its window reaches.
    """
    rows, length, heads, size = query.shape
    block, scores = queries_at_once(length), scores.within(length)
    if block == length:
        return attention(query, key, value, causal(length, mask, scores.window), scores.cap, sink)
    blocks = -(-length // block)
    padded = jnp.pad(query, ((0, 0), (0, blocks * block - length), (0, 0), (0, 0)))

    @jax.checkpoint
    def attend(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        first, queries = part
        if scores.window is not None:
            return attend_in_window(first, queries, scores.window)
        before = jnp.arange(length) <= first + jnp.arange(block)[:, None]
        return attention(queries, key, value, mask[:, None, :] & before, scores.cap, sink)

    def attend_in_window(first: jax.Array, queries: jax.Array, window: int) -> jax.Array:
        reached = keys_at_once(length, window)
        begin = jnp.clip(first - window + 1, 0, length - reached)
        keys, values, real = (jax.lax.dynamic_slice_in_dim(x, begin, reached, axis=1) for x in (key, value, mask))
        distance = first + jnp.arange(block)[:, None] - (begin + jnp.arange(reached))
        visible = real[:, None, :] & (distance >= 0) & (distance < window)
        return attention(queries, keys, values, visible, scores.cap, sink)

    parts = jnp.arange(blocks) * block, padded.reshape(rows, blocks, block, heads, size).swapaxes(0, 1)
    return jax.lax.map(attend, parts).swapaxes(0, 1).reshape(rows, -1, heads, size)[:, :length]


def queries_at_once(length: int) -> int:
    """Tokens of a sequence whose scores `causal_attention` has in memory at once."""
    return length if length <= 2 * QUERY_BLOCK else QUERY_BLOCK


def keys_at_once(length: int, window: int | None = None) -> int:
    """Keys that `causal_attention` multiplies with each of these tokens."""
    block = queries_at_once(length)
    return length if block == length or window is None else min(block + window - 1, length)


Attend = Callable[..., jax.Array]  # (query, key, value, sink=None) -> [N, T, heads, H] float32


@dataclass(frozen=True)
class BinAttention:
    """An implementation of attention within bins: what it takes, what it computes."""

    name: str
    attend: Callable[..., Attend]  # device: (bins, scores=PLAIN), attention in the bins, for all layers of a kind
    prepare: Callable[[Bins], Bins]  # host: the bins with the arrays that it needs besides
    pairs: Callable[..., np.ndarray]  # host: (bins, window=None), [N] scores of a query and a key that it computes
    skips: bool  # it leaves out most pairs that do not see each other
    packs: bool = True  # a bin may hold several trees
    shared_width: int = 0  # slots of the widest bin in which responses may share a prompt, ...
    windows_share: bool = True  # ... also if layers have a window
    rounded: Callable[[int], int] = int  # the next width of a bin that it takes, in slots


def visible_in_bins(bins: Bins, window: int | None = None) -> jax.Array:
    """visible [N, T, T]: a token sees those up to itself of its own branch and of its tree's prompt.

    Args:
        window: of so many positions.
    """
    trees, branches, positions = bins.trees, bins.branches, bins.positions
    same_tree = trees[:, :, None] == trees[:, None, :]
    seen = (branches[:, None, :] == 0) | (branches[:, :, None] == branches[:, None, :])
    visible = same_tree & seen & jnp.tril(jnp.ones(trees.shape[-1:] * 2, bool))
    return visible if window is None else visible & (positions[:, None, :] > positions[:, :, None] - window)


def _attend_xla(bins: Bins, scores: Scores = PLAIN) -> Attend:
    scores = scores.within(bins.trees.shape[1])
    visible = visible_in_bins(bins, scores.window)
    return lambda query, key, value, sink=None: attention(query, key, value, visible, scores.cap, sink)


XLA = BinAttention(
    name="xla",
    attend=_attend_xla,
    prepare=lambda bins: bins,
    pairs=lambda bins, window=None: np.full(len(bins.trees), float(bins.trees.shape[1]) ** 2),
    skips=False,
    shared_width=2**31,
)
