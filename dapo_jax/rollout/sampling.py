"""Device: drawing the next token. Each draw has an address, so no layout of the rows can change it."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

BLOCK = 128  # vocabulary entries per block of the two-level inverse CDF
# Purposes: the first part of an address after the seed.
TRAIN, EVALUATE, BASELINE, SELECT = range(4)


@struct.dataclass
class Sampling:
    """How to draw. Every field is traced: a new value needs no new compilation."""

    temperature: Any
    top_p: Any  # 1 = off
    top_k: Any  # 0 = off
    greedy: Any  # True = the most likely token
    min_length: Any  # no end-of-sequence token is drawn before this many tokens

    @classmethod
    def create(cls, temperature: float, top_p: float, top_k: int, min_length: int = 0) -> "Sampling":
        """Temperature 0 is greedy: the most likely token, with its log-probability at temperature 1."""
        greedy = temperature == 0
        return cls(
            temperature=np.float32(1.0 if greedy else temperature),
            top_p=np.float32(1.0 if greedy else top_p),
            top_k=np.int32(0 if greedy else max(top_k, 0)),
            greedy=np.bool_(greedy),
            min_length=np.int32(min_length),
        )


def row_keys(seed: int, purpose: int, numbers: jax.Array, num_samples: int) -> jax.Array:
    """Keys [Q * n] of (seed, purpose, prompt number, sample), a prompt's one after the other; numbers [Q] int32."""
    samples = jnp.tile(jnp.arange(num_samples, dtype=jnp.int32), numbers.shape[0])
    return keys_of(seed, purpose, jnp.repeat(numbers, num_samples), samples)


@jax.jit
def keys_of(seed: int, purpose: int, numbers: jax.Array, samples: jax.Array) -> jax.Array:
    """Keys [B] of (seed, purpose, prompt number, sample); numbers and samples [B] int32."""
    base = jax.random.fold_in(jax.random.key(seed), purpose)
    prompts = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(base, numbers)
    return jax.vmap(jax.random.fold_in)(prompts, samples)


@functools.partial(jax.jit, static_argnames=("num_samples", "length"))
def position_noise(seed: int, purpose: int, numbers: jax.Array, num_samples: int, length: int) -> jax.Array:
    """Uniform draws [Q * n, length] in [0, 1) of (seed, purpose, prompt number, sample, position); numbers [Q]."""

    def row(key):
        return jax.vmap(lambda position: jax.random.uniform(jax.random.fold_in(key, position)))(jnp.arange(length))

    return jax.vmap(row)(row_keys(seed, purpose, numbers, num_samples))


def sample(
    logits: jax.Array, keys: jax.Array, position: jax.Array, sampling: Sampling, eos_ids: tuple[int, ...] = ()
) -> tuple[jax.Array, jax.Array]:
    """One token per row, and its log-probability log_softmax(logits / temperature) over the whole vocabulary.

    Args:
        logits: [B, V] float32.
        keys: [B], from `row_keys`.
        position: scalar, number of tokens sampled before.
        eos_ids: tokens not drawn before sampling.min_length.

    Returns:
        tokens [B] int32 and logprobs [B] float32.
    """
    logits = logits / sampling.temperature
    highest = jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.exp(logits - highest)  # for the normaliser and the draw
    allowed = jnp.ones(logits.shape[-1], bool).at[jnp.array(eos_ids, jnp.int32)].set(position >= sampling.min_length)
    highest_allowed = jnp.max(jnp.where(allowed, logits, -jnp.inf), axis=-1, keepdims=True)
    candidates = jnp.where(allowed, jnp.exp(logits - highest_allowed), 0.0)
    candidates = jnp.where(candidates >= _lowest_weight(candidates, sampling), candidates, 0.0)
    uniform = jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, position)))(keys)
    tokens = inverse_cdf(candidates, jnp.where(sampling.greedy, 0.0, uniform))
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1) - highest
    return tokens.astype(jnp.int32), chosen[:, 0] - jnp.log(jnp.sum(weights, axis=-1))


def inverse_cdf(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """Token [B] at which the cumulative sum of `weights` [B, V] passes `uniform` [B] in [0, 1) of their total.

    Two levels, first the block, then the entry: no cumulative sum runs over the whole vocabulary.
    Entries of weight 0 are never returned.
    """
    rows, vocabulary = weights.shape
    blocks = jnp.pad(weights, ((0, 0), (0, -vocabulary % BLOCK))).reshape(rows, -1, BLOCK)
    totals = jnp.sum(blocks, axis=-1)
    target = uniform * jnp.sum(totals, axis=-1)
    block, before = _first_above(totals, target)
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    entry, _ = _first_above(inside, target - before)
    return block * BLOCK + entry


def _first_above(weights: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    """First index with positive weight whose cumulative sum exceeds `target`, and the sum before it.

    If rounding leaves none, the last index with positive weight.
    """
    cumulative = jnp.cumsum(weights, axis=-1)
    positive = weights > 0
    above = positive & (cumulative > target[:, None])
    last = weights.shape[-1] - 1 - jnp.argmax(positive[:, ::-1], axis=-1)
    index = jnp.where(jnp.any(above, axis=-1), jnp.argmax(above, axis=-1), last)
    before = jnp.take_along_axis(cumulative - weights, index[:, None], axis=-1)[:, 0]
    return index, before


def _lowest_weight(weights: jax.Array, sampling: Sampling) -> jax.Array:
    """The smallest weight [B, 1] that may be drawn: the highest if greedy, else that of top-k, and then of top-p.

    Top-p keeps a token if those above it have less than top_p of the mass that top-k leaves. Equal weights are kept
    or dropped together.
    """
    top_k, top_p = sampling.top_k, sampling.top_p
    of_top_k = _smallest_above_which(weights, lambda above: jnp.sum(above, axis=-1) < top_k, needed=top_k > 0)
    mass = jnp.sum(jnp.where(weights >= of_top_k, weights, 0.0), axis=-1)
    of_top_p = _smallest_above_which(
        weights, lambda above: jnp.sum(jnp.where(above, weights, 0.0), axis=-1) < top_p * mass, needed=top_p < 1
    )
    highest = jnp.max(weights, axis=-1, keepdims=True)
    return jnp.where(sampling.greedy, highest, jnp.maximum(of_top_k, of_top_p))


def _smallest_above_which(weights: jax.Array, holds: Callable[[jax.Array], jax.Array], *, needed: Any) -> jax.Array:
    """The smallest t in [0, 1] with `holds(weights > t)`, [B, 1], by bisection over the floating-point numbers.

    Exact, without a sort, in 30 passes over the weights; 0, without a pass, if it is not `needed`.
    """
    one = np.float32(1.0).view(np.int32)  # the bits of non-negative floats are ordered like the floats
    low = jnp.zeros(weights.shape[:1], jnp.int32)
    high = low + jnp.where(needed, one, 0)

    def halve(_: Any, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low + high) // 2
        enough = holds(weights > jax.lax.bitcast_convert_type(middle, jnp.float32)[:, None])
        return jnp.where(enough, low, jnp.minimum(middle + 1, high)), jnp.where(enough, middle, high)

    _, high = jax.lax.fori_loop(0, jnp.where(needed, int(one).bit_length(), 0), halve, (low, high))
    return jax.lax.bitcast_convert_type(high, jnp.float32)[:, None]
