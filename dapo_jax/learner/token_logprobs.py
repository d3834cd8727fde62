"""Device: log-probabilities of response tokens, and more of their distributions, by the training forward pass."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dapo_jax.data.containers import MicroBatch
from dapo_jax.learner.trainable import Passes
from dapo_jax.models import transformer
from dapo_jax.models.context import by_parts
from dapo_jax.models.experts import RoutingCounts
from dapo_jax.parallel.ordered_sums import rows_along
from dapo_jax.parallel.sharding import context_shards, shards_left, tensor_shards

NORMALIZER = "normalizer"  # name of what is kept of a chunk's distributions for the backward pass


class TokenStatistics(NamedTuple):
    """Of each response token and the distribution softmax(logits / temperature) that it was drawn from; all [S, U]."""

    logprobs: Any
    entropy: Any
    sum_pi_squared: Any  # sum over the vocabulary of the squared probabilities
    of_candidates: Any = None  # [S, U, K] log-probabilities of the batch's candidates, if it has some


def response_statistics(
    params: transformer.Params,
    batch: MicroBatch,
    passes: Passes,
    *,
    temperature: float,
    remat: str,
    chunk_size: int,
    entropy_gradient: bool,
) -> tuple[TokenStatistics, RoutingCounts | None]:
    """The statistics of each response token, and what the routers did.

    Logits exist for about `chunk_size` tokens at a time on each device, in the backward pass too.

    Args:
        params: weights in the dtype of the matrix products.
        remat: as for `response_hidden`.
        chunk_size: tokens on one device.
        entropy_gradient: whether the entropy and the squares are differentiated, or only reported.
    """
    hidden, counts = response_hidden(params, batch, passes, remat=remat)
    rounded = transformer.rounded_head(params)

    def chunk_statistics(chunk):
        hidden, tokens, candidates = chunk
        logits = transformer.logits(params, hidden, passes.arch, rounded) / temperature
        logprobs, normalizer = chosen_logprobs(logits, tokens)
        entropy, squares = spread(logits if entropy_gradient else jax.lax.stop_gradient(logits))
        of_candidates = None if candidates is None else logits_of(logits, candidates) - normalizer[..., None]
        return TokenStatistics(logprobs, entropy, squares, of_candidates)

    arrays = hidden, batch.responses, batch.candidates
    return _in_chunks(chunk_statistics, arrays, chunk_size), counts


@jax.custom_vjp
def chosen_logprobs(logits: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """log_softmax(logits) of one token each, and logsumexp(logits); [..., V] and [...] -> [...] twice.

    The backward pass reads the logits once: it has the normalizer from the forward pass, in `_in_chunks` too.
    """
    distances, highest = _below_the_highest(logits)
    normalizer = jnp.log(jnp.sum(jnp.exp(distances), axis=-1)) + highest
    return logits_of(logits, tokens[..., None])[..., 0] - normalizer, normalizer


def _chosen_forward(logits: jax.Array, tokens: jax.Array) -> tuple[Any, Any]:
    logprobs, normalizer = chosen_logprobs(logits, tokens)
    normalizer = checkpoint_name(normalizer, NORMALIZER)
    return (logprobs, normalizer), (logits, tokens, normalizer)


def _chosen_backward(saved: Any, cotangents: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
    logits, tokens, normalizer = saved
    of_logprobs, of_normalizer = (x[..., None] for x in cotangents)
    is_chosen = tokens[..., None] == jnp.arange(logits.shape[-1])  # a scatter would not keep the vocabulary sharded
    probabilities = jnp.exp(logits - normalizer[..., None])
    return jnp.where(is_chosen, of_logprobs, 0.0) + (of_normalizer - of_logprobs) * probabilities, None


chosen_logprobs.defvjp(_chosen_forward, _chosen_backward)


def spread(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Entropy and sum of squared probabilities of softmax(logits), [..., V] -> [...] twice.

    They are sums over the terms of the normalizer of `chosen_logprobs`, so that one pass over the logits finds all.
    """
    distances, _ = _below_the_highest(logits)
    weights = jnp.exp(distances)
    total = jnp.sum(weights, axis=-1)
    entropy = jnp.log(total) - jnp.sum(weights * distances, axis=-1) / total
    return entropy, jnp.sum(jnp.square(weights), axis=-1) / jnp.square(total)


def _below_the_highest(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """How far each logit is from its row's highest, [..., V], and the highest [...]; the latter has no gradient."""
    highest = jax.lax.stop_gradient(jnp.max(logits, axis=-1))
    return logits - highest[..., None], highest


def most_likely_tokens(
    params: transformer.Params, batch: MicroBatch, passes: Passes, *, chunk_size: int, count: int
) -> jax.Array:
    """The `count` most likely tokens [S, U, K] in the place of each response token, the likeliest first.

    Args:
        params, chunk_size: as for `response_statistics`.
    """
    hidden, _ = response_hidden(params, batch, passes, remat="none")
    rounded = transformer.rounded_head(params)

    def chunk_highest(chunk):
        return highest(transformer.logits(params, chunk, passes.arch, rounded), count)

    return _in_chunks(chunk_highest, hidden, chunk_size)


def highest(logits: jax.Array, count: int) -> jax.Array:
    """Indices of the `count` highest logits, [..., V] -> [..., K] int32, the highest first and of equal ones the first.

    Each shard of the vocabulary finds its own, so no device needs all logits.
    """
    parts = _by_shard(logits)
    values, places = jax.lax.top_k(parts, min(count, parts.shape[-1]))
    numbers = places + parts.shape[-1] * jnp.arange(parts.shape[-2])[:, None]
    _, best = jax.lax.top_k(values.reshape(*logits.shape[:-1], -1), count)
    return jnp.take_along_axis(numbers.reshape(*logits.shape[:-1], -1), best, axis=-1).astype(jnp.int32)


def logits_of(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """The logits of some tokens, [..., V] and [..., K] -> [..., K]; 0 of a token beyond V.

    Each shard of the vocabulary picks its own, and the sum over the shards has them all.
    """
    parts = _by_shard(logits)
    size = parts.shape[-1]
    places = tokens[..., None, :] - size * jnp.arange(parts.shape[-2])[:, None]
    picked = jnp.take_along_axis(parts, jnp.clip(places, 0, size - 1), axis=-1)
    return jnp.sum(picked, axis=-2, where=(places >= 0) & (places < size))


def _by_shard(logits: jax.Array) -> jax.Array:
    """[..., V] -> [..., shards, V / shards], each shard on its devices."""
    shards = tensor_shards()
    return logits.reshape(*logits.shape[:-1], shards, logits.shape[-1] // shards)


def _in_chunks(function: Callable[[Any], Any], arrays: Any, chunk_size: int) -> Any:
    """`function` of arrays [S, U, ...], for about `chunk_size` tokens at a time on each device.

    Of the first array, each of the C devices along "context" has its part: [S * C, U // C, ...].
    """
    rows, length = jax.tree.leaves(arrays)[0].shape[:2]
    arrays = jax.tree.map(lambda x: x.reshape(rows, length, *x.shape[2:]), arrays)
    widest = min(max(chunk_size * shards_left() // rows, 1), length)
    columns = -(-length // -(-length // widest))  # as many chunks, with the least padding
    kept = jax.checkpoint_policies.save_only_these_names(NORMALIZER)
    results = jax.lax.map(
        jax.checkpoint(function, policy=kept), jax.tree.map(lambda x: _split_columns(x, columns), arrays)
    )
    results = jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(rows, -1, *x.shape[3:])[:, :length], results)
    return jax.tree.map(lambda x: x.reshape(rows // context_shards(), -1, *x.shape[2:]), results)


def response_hidden(
    params: transformer.Params, batch: MicroBatch, passes: Passes, *, remat: str
) -> tuple[jax.Array, RoutingCounts | None]:
    """Hidden states [S * C, U // C, D] float32 that predict each response token, and what the routers did.

    C devices along "context" each have those of their part of the slots.

    Args:
        remat: that of `passes`, or "none" without a backward pass.
    """
    arch, attention = passes.arch, passes.attention
    hidden, counts = transformer.forward_bins(params, batch.bins, arch, kernel=attention, remat=remat)
    of_parts = by_parts(hidden, len(batch.sources))
    return rows_along(of_parts, batch.sources.reshape(len(of_parts), -1)), counts


def _split_columns(x: jax.Array, columns: int) -> jax.Array:
    """[B, R, ...] -> [R / columns, B, columns, ...], zero-padded; rows stay together, and so on their device."""
    missing = -x.shape[1] % columns
    x = jnp.pad(x, ((0, 0), (0, missing)) + ((0, 0),) * (x.ndim - 2))
    return x.reshape(x.shape[0], -1, columns, *x.shape[2:]).swapaxes(0, 1)
