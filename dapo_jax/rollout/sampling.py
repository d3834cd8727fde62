"""Device: drawing the next token. Each draw has an address, so that no layout of the rows can change it."""

import functools

import jax
import jax.numpy as jnp
from flax import struct

BLOCK = 128  # vocabulary entries per block of the two-level inverse CDF
# Purposes: the first part of an address after the seed.
TRAIN, EVALUATE, BASELINE, SELECT = range(4)


@struct.dataclass
class Sampling:
    """How to draw. The scalars are traced: a new value needs no new compilation."""

    temperature: float | jax.Array = 1.0
    top_p: float | jax.Array = 1.0
    top_k: int | jax.Array = -1  # -1 = off
    greedy: bool = struct.field(pytree_node=False, default=False)
    truncated: bool = struct.field(pytree_node=False, default=False)  # whether top_p or top_k is in use

    @classmethod
    def create(cls, temperature: float, top_p: float, top_k: int) -> "Sampling":
        """Temperature 0 is greedy: the most likely token, whose log-probability is given at temperature 1."""
        greedy = temperature == 0
        return cls(1.0 if greedy else temperature, top_p, top_k, greedy, truncated=top_p < 1 or top_k > 0)


def row_keys(seed: int, purpose: int, numbers: jax.Array, num_samples: int) -> jax.Array:
    """Keys [Q * n] of (seed, purpose, prompt number, sample); numbers [Q] int32."""
    base = jax.random.fold_in(jax.random.key(seed), purpose)
    fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    prompts = fold(base, numbers)
    return jax.vmap(fold, in_axes=(0, None))(prompts, jnp.arange(num_samples)).reshape(-1)


@functools.partial(jax.jit, static_argnames=("num_samples", "length"))
def position_noise(seed: int, purpose: int, numbers: jax.Array, num_samples: int, length: int) -> jax.Array:
    """Uniform draws [Q * n, length] in [0, 1) of (seed, purpose, prompt number, sample, position); numbers [Q]."""

    def row(key):
        return jax.vmap(lambda position: jax.random.uniform(jax.random.fold_in(key, position)))(jnp.arange(length))

    return jax.vmap(row)(row_keys(seed, purpose, numbers, num_samples))


def sample(
    logits: jax.Array, keys: jax.Array, position: jax.Array, sampling: Sampling
) -> tuple[jax.Array, jax.Array]:
    """One token a row, and its log-probability log_softmax(logits / temperature) over the whole vocabulary.

    Args:
        logits: [B, V] float32.
        keys: [B], from `row_keys`.
        position: scalar, how many tokens were sampled before.

    Returns:
        tokens [B] int32 and logprobs [B] float32.
    """
    logits = logits / sampling.temperature
    highest = jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.exp(logits - highest)  # serves the normaliser and the draw
    if sampling.greedy:
        tokens = jnp.argmax(logits, axis=-1)
    else:
        uniform = jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, position)))(keys)
        kept = jnp.where(_truncation(logits, sampling), weights, 0.0) if sampling.truncated else weights
        tokens = inverse_cdf(kept, uniform)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1) - highest
    return tokens.astype(jnp.int32), chosen[:, 0] - jnp.log(jnp.sum(weights, axis=-1))


def inverse_cdf(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """Token [B] at which the cumulative sum of `weights` [B, V] passes `uniform` [B] in [0, 1) of their total.

    Two levels, so that no cumulative sum runs over the whole vocabulary: first the block, then the entry.
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


def _truncation(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """True [B, V] for the top-k tokens, and of those for the smallest set of mass top-p."""
    vocabulary = logits.shape[-1]
    ordered = -jnp.sort(-logits, axis=-1)
    top_k = jnp.where(sampling.top_k > 0, jnp.minimum(sampling.top_k, vocabulary), vocabulary)
    ordered = jnp.where(jnp.arange(vocabulary) < top_k, ordered, -jnp.inf)
    probabilities = jax.nn.softmax(ordered, axis=-1)
    mass_before = jnp.cumsum(probabilities, axis=-1) - probabilities
    kept = (mass_before < sampling.top_p) & (ordered > -jnp.inf)
    threshold = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
    return logits >= threshold
