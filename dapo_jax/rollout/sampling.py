"""Device: drawing the next token. Each draw has an address, so no layout of the rows can change it."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from dapo_jax.models.vocabulary_blocks import BLOCK, BlockSums, tokens_of_blocks

# Purposes: the first part of an address after the seed.
TRAIN, EVALUATE, BASELINE, SELECT = range(4)
COARSE = 2.0**-10  # share of a block in which the 23 bits of a uniform draw do not tell tokens apart


@struct.dataclass
class Sampling:
    """How to draw. Every field is traced: a new value needs no new compilation, unless `limits` changes."""

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

    @property
    def is_filtered(self) -> Any:
        """Whether unlikely tokens are never drawn."""
        return self.greedy | (self.top_p < 1) | (self.top_k > 0)

    @property
    def limits(self) -> bool:
        """Host: whether some token may not be drawn somewhere."""
        return bool(self.is_filtered | (self.min_length > 0))


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
    logits: jax.Array,
    keys: jax.Array,
    position: jax.Array,
    sampling: Sampling,
    eos_ids: tuple[int, ...] = (),
    *,
    limits: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """One token per row, and its log-probability log_softmax(logits / temperature) over the whole vocabulary.

    While every token may be drawn, this reads the logits twice: for the highest, and for one exponential of each.

    Args:
        logits: [B, n, BLOCK] float32, see models/vocabulary_blocks.py.
        keys: [B], from `row_keys`.
        position: scalar or [B], number of tokens sampled before.
        eos_ids: tokens not drawn before sampling.min_length.
        limits: False only if `sampling.limits` is: nothing then depends on it, which ends a GPU's graph of kernels.

    Returns:
        tokens [B] int32 and logprobs [B] float32.
    """
    # Without the barrier, compilers divide again in each pass, with another rounding, and copy to other layouts.
    logits = jax.lax.optimization_barrier(logits / sampling.temperature)
    highest = jnp.max(logits, axis=(1, 2), keepdims=True)
    early = jnp.reshape(position < sampling.min_length, (-1, 1, 1))  # of each row, or of all

    def forbidden(tokens: jax.Array) -> jax.Array:
        return early & jnp.any(tokens[..., None] == jnp.array(eos_ids, jnp.int32), axis=-1)

    def limited() -> tuple[jax.Array, jax.Array, jax.Array]:
        allowed = jnp.where(forbidden(tokens_of_blocks(logits)), -jnp.inf, logits)
        weights, reference, lowest = _limits(allowed, sampling)
        mass = jax.lax.cond(jnp.any(early), lambda: _mass(jnp.exp(logits - highest)), lambda: _mass(weights))
        return reference, lowest, mass

    def no_limits() -> tuple[jax.Array, jax.Array, jax.Array]:
        return highest, jnp.full_like(highest, -jnp.inf), jnp.zeros_like(highest[:, 0, 0])

    is_limited = jnp.any(early) | sampling.is_filtered if limits else jnp.bool_(False)
    reference, lowest, mass = jax.lax.cond(is_limited, limited, no_limits) if limits else no_limits()

    def weigh(logits: jax.Array, tokens: jax.Array) -> jax.Array:
        if not limits:
            return jnp.exp(logits - reference)
        return jnp.where((logits < lowest) | forbidden(tokens), 0.0, jnp.exp(logits - reference))

    def weights_in(block: jax.Array) -> jax.Array:
        place = block[:, None, None]
        return weigh(jnp.take_along_axis(logits, place, axis=1), place * BLOCK + jnp.arange(BLOCK))[:, 0]

    totals = _totals(weigh(logits, tokens_of_blocks(logits)))
    mass = jnp.where(is_limited, mass, jnp.sum(totals, axis=-1))
    tokens = inverse_cdf(totals, weights_in, *jnp.where(sampling.greedy, 0.0, _uniforms(keys, position)))
    return tokens, _chosen(logits, tokens) - highest[:, 0, 0] - jnp.log(mass)


def sample_of_blocks(sums: BlockSums, keys: jax.Array, position: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`sample` where every token may be drawn, from logits that are divided by the temperature: a block of each row."""
    highest = jnp.max(sums.highest, axis=1, keepdims=True)
    totals = sums.totals * jnp.exp(sums.highest - highest)
    mass = jnp.sum(totals, axis=-1)
    block, rest = _block(totals, *_uniforms(keys, position))
    logits = sums.logits_in(block)  # once, else as `inverse_cdf`
    own = jnp.max(logits, axis=1)  # the weights of a block far below the highest are 0
    place, _ = _first_above(jnp.exp(logits - own[:, None]), rest * jnp.exp(highest[:, 0] - own))
    chosen = jnp.take_along_axis(logits, place[:, None], axis=1)[:, 0]
    return (block * BLOCK + place).astype(jnp.int32), chosen - highest[:, 0] - jnp.log(mass)


def _uniforms(keys: jax.Array, position: jax.Array) -> jax.Array:
    """[2, B] in [0, 1), of each row's address: for the token, and for its place in a block of small share."""

    def draws(key: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(key, position)
        return jnp.stack([jax.random.uniform(key), jax.random.uniform(jax.random.fold_in(key, 1))])

    return jax.vmap(draws, out_axes=1)(keys, jnp.broadcast_to(position, keys.shape))


def _chosen(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """The logit [B] of each row's token."""
    return logits[jnp.arange(len(tokens)), tokens // BLOCK, tokens % BLOCK]


def inverse_cdf(
    totals: jax.Array, weights_in: Callable[[jax.Array], jax.Array], uniform: jax.Array, finer: jax.Array
) -> jax.Array:
    """Token [B] int32 at which the cumulative sum of the weights passes `uniform` [B] in [0, 1) of their total.

    Two levels, first the block, then the token in it: no cumulative sum runs over the whole vocabulary.
    Tokens of weight 0 are never returned.

    Args:
        totals: [B, n], the sum of the weights in each block.
        weights_in: block [B] -> its weights [B, BLOCK].
        finer: [B] in [0, 1), the place in a block whose share is below `COARSE`.
    """
    block, rest = _block(totals, uniform, finer)
    place, _ = _first_above(weights_in(block), rest)
    return (block * BLOCK + place).astype(jnp.int32)


def _block(totals: jax.Array, uniform: jax.Array, finer: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The block [B] of each token of `inverse_cdf`, and the sum of the weights in it that come before the token.

    In a block of small share the numbers `uniform` that lead there are few: with them alone, a confident policy would
    draw most of its unlikely tokens at the beginning of a block.
    """
    mass = jnp.sum(totals, axis=-1)
    block, before = _first_above(totals, uniform * mass)
    own = jnp.take_along_axis(totals, block[:, None], axis=-1)[:, 0]
    return block, jnp.where(own < COARSE * mass, finer * own, uniform * mass - before)


def _totals(weights: jax.Array) -> jax.Array:
    """[B, n, BLOCK] -> [B, n]. The barrier keeps compilers from summing all weights again to sum the totals."""
    return jax.lax.optimization_barrier(jnp.sum(weights, axis=-1))


def _mass(weights: jax.Array) -> jax.Array:
    """[B, n, BLOCK] -> [B], added up as the draw does."""
    return jnp.sum(_totals(weights), axis=-1)


def _limits(logits: jax.Array, sampling: Sampling) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The weights exp(logits - highest) of `logits` [B, n, BLOCK], the highest, and the lowest that may be drawn.

    The latter are [B, 1, 1]. The lowest is a logit, not a weight, so that each pass that compares with it agrees.
    """
    highest = jnp.max(logits, axis=(1, 2), keepdims=True)
    weights = jnp.exp(logits - highest)
    kept = weights >= _lowest_weight(weights, sampling)
    return weights, highest, jnp.min(jnp.where(kept, logits, jnp.inf), axis=(1, 2), keepdims=True)


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
    """The smallest of the weights [B, n, BLOCK] that may be drawn, [B, 1, 1].

    It is the highest, 1, if greedy; else that of top-k, and then of top-p. Top-p keeps a token if those above it have
    less than top_p of the mass that top-k leaves. Equal weights are kept or dropped together.
    """
    top_k, top_p = sampling.top_k, sampling.top_p
    of_top_k = _smallest_with_less_above(weights, 1.0, 1.0 * top_k, needed=top_k > 0)
    mass = jnp.sum(jnp.where(weights >= of_top_k, weights, 0.0), axis=(1, 2))
    of_top_p = _smallest_with_less_above(weights, weights, top_p * mass, needed=top_p < 1)
    return jnp.where(sampling.greedy, 1.0, jnp.maximum(of_top_k, of_top_p))


def _smallest_with_less_above(weights: jax.Array, counts: Any, limit: jax.Array, *, needed: Any) -> jax.Array:
    """The smallest t in [0, 1], [B, 1, 1], such that the sum of `counts` where weights > t is less than `limit`.

    Found by bisection over the floating-point numbers: exact, without a sort, in 30 passes over the weights. 0, without
    a pass, if it is not `needed`. Counts of 1.0 are exact up to 2^24, and faster than integers on a CPU.
    """
    one = np.float32(1.0).view(np.int32)  # the bits of non-negative floats are ordered like the floats
    low = jnp.zeros(weights.shape[:1], jnp.int32)
    high = low + jnp.where(needed, one, 0)

    def halve(_: Any, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low + high) // 2
        above = weights > jax.lax.bitcast_convert_type(middle, jnp.float32)[:, None, None]
        enough = jnp.sum(jnp.where(above, counts, 0.0), axis=(1, 2)) < limit
        return jnp.where(enough, low, jnp.minimum(middle + 1, high)), jnp.where(enough, middle, high)

    _, high = jax.lax.fori_loop(0, jnp.where(needed, int(one).bit_length(), 0), halve, (low, high))
    return jax.lax.bitcast_convert_type(high, jnp.float32)[:, None, None]
