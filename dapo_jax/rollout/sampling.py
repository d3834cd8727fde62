"""Device: drawing the next token. Each draw has an address, so that no layout of the rows can change it."""

import jax
import jax.numpy as jnp
from flax import struct

BLOCK = 128  # vocabulary entries per block of the two-level inverse CDF
TRAIN, EVALUATE = 0, 1  # purposes: the first part of an address after the seed


@struct.dataclass
class Sampling:
    """How to draw; traced scalars, so that a new value needs no new compilation."""

    temperature: float | jax.Array = 1.0  # 0 = greedy
    top_p: float | jax.Array = 1.0
    top_k: int | jax.Array = -1  # -1 = off
    truncated: bool = struct.field(pytree_node=False, default=False)  # whether top_p or top_k is in use

    @classmethod
    def create(cls, temperature: float, top_p: float, top_k: int) -> "Sampling":
        return cls(temperature, top_p, top_k, truncated=top_p < 1 or top_k > 0)


def row_keys(seed: int, purpose: int, numbers: jax.Array, num_samples: int) -> jax.Array:
    """Keys [Q * n] of (seed, purpose, prompt number, sample); numbers [Q] int32."""
    base = jax.random.fold_in(jax.random.key(seed), purpose)
    fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    prompts = fold(base, numbers)
    return jax.vmap(fold, in_axes=(0, None))(prompts, jnp.arange(num_samples)).reshape(-1)


def sample(
    logits: jax.Array, keys: jax.Array, position: jax.Array, sampling: Sampling
) -> tuple[jax.Array, jax.Array]:
    """One token a row, and its log-probability log_softmax(logits / temperature) over the whole vocabulary.

    Args:
        logits: [B, V] float32.
        keys: [B], from `row_keys`.
        position: scalar, how many tokens were sampled before.

    Returns:
        tokens [B] int32 and logprobs [B] float32. Greedy tokens have their log-probability at temperature 1.
    """
    greedy = sampling.temperature == 0
    logits = logits / jnp.where(greedy, 1.0, sampling.temperature)
    candidates = _truncate(logits, sampling) if sampling.truncated else logits
    uniform = jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, position)))(keys)
    tokens = jnp.where(greedy, jnp.argmax(logits, axis=-1), inverse_cdf(candidates, uniform))
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    return tokens.astype(jnp.int32), chosen - jax.nn.logsumexp(logits, axis=-1)


def inverse_cdf(logits: jax.Array, uniform: jax.Array) -> jax.Array:
    """Token [B] at which softmax(logits)'s cumulative sum passes `uniform` [B] in [0, 1).

    Two levels, so that no cumulative sum runs over the whole vocabulary: first the block, then the entry.
    Entries of probability 0 are never returned.
    """
    rows, vocabulary = logits.shape
    weights = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    blocks = jnp.pad(weights, ((0, 0), (0, -vocabulary % BLOCK))).reshape(rows, -1, BLOCK)
    totals = jnp.sum(blocks, axis=-1)
    block, before = _first_above(totals, uniform * jnp.sum(totals, axis=-1))
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    target = uniform * jnp.sum(totals, axis=-1) - before
    entry, _ = _first_above(inside, target)
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


def _truncate(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Logits with all but the top-k, and of those all but the smallest set of mass top-p, at -inf."""
    vocabulary = logits.shape[-1]
    ordered = -jnp.sort(-logits, axis=-1)
    top_k = jnp.where(sampling.top_k > 0, jnp.minimum(sampling.top_k, vocabulary), vocabulary)
    ordered = jnp.where(jnp.arange(vocabulary) < top_k, ordered, -jnp.inf)
    probabilities = jax.nn.softmax(ordered, axis=-1)
    mass_before = jnp.cumsum(probabilities, axis=-1) - probabilities
    kept = (mass_before < sampling.top_p) & (ordered > -jnp.inf)
    threshold = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits >= threshold, logits, -jnp.inf)
