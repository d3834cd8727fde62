"""Device: log-probability and entropy of response tokens under the training forward pass."""

import jax
import jax.numpy as jnp

from dapo_jax.data.containers import MicroBatch
from dapo_jax.models import transformer
from dapo_jax.models.architecture import Architecture
from dapo_jax.models.attention import BinAttention
from dapo_jax.models.experts import RoutingCounts
from dapo_jax.parallel.sharding import shards_left


def response_logprobs(
    params: transformer.Params,
    batch: MicroBatch,
    *,
    arch: Architecture,
    temperature: float,
    remat: str,
    attention: BinAttention,
    chunk_size: int,
    entropy_gradient: bool,
) -> tuple[jax.Array, jax.Array, RoutingCounts | None]:
    """Log-probability [S, U] of each response token, entropy [S, U] of its distribution, and what the routers did.

    The first two are of softmax(logits / temperature) over the whole vocabulary. Logits exist for about `chunk_size`
    tokens at a time on each device, in the backward pass too.

    Args:
        params: weights in the dtype of the matrix products.
        remat, attention: as for `response_hidden`.
        chunk_size: tokens on one device.
        entropy_gradient: whether the entropy is differentiated, or only reported.
    """
    hidden, counts = response_hidden(params, batch, arch=arch, remat=remat, attention=attention)

    def chunk_logprobs(chunk):
        hidden, tokens = chunk
        logits = transformer.logits(params, hidden, arch) / temperature
        normalizer = jax.nn.logsumexp(logits, axis=-1)
        is_chosen = tokens[..., None] == jnp.arange(logits.shape[-1])  # a gather would not keep the vocabulary sharded
        chosen = jnp.sum(logits, axis=-1, where=is_chosen)
        log_probabilities = logits - normalizer[..., None]
        if not entropy_gradient:
            log_probabilities = jax.lax.stop_gradient(log_probabilities)
        entropy = -jnp.sum(jnp.exp(log_probabilities) * log_probabilities, axis=-1)
        return chosen - normalizer, entropy

    rows, length = batch.responses.shape
    widest = min(max(chunk_size * shards_left() // rows, 1), length)
    columns = -(-length // -(-length // widest))  # as many chunks, with the least padding
    chunks = jax.tree.map(lambda x: _split_columns(x, columns), (hidden, batch.responses))
    logprobs, entropy = jax.lax.map(jax.checkpoint(chunk_logprobs), chunks)
    return _join_columns(logprobs, length), _join_columns(entropy, length), counts


def response_hidden(
    params: transformer.Params, batch: MicroBatch, *, arch: Architecture, remat: str, attention: BinAttention
) -> tuple[jax.Array, RoutingCounts | None]:
    """Hidden states [S, U, D] float32 that predict each response token, and what the routers did.

    Args:
        remat: a name of models/remat.py's POLICIES.
    """
    hidden, counts = transformer.forward_bins(params, batch.bins, arch, kernel=attention, remat=remat)
    of_shares = hidden.reshape(len(batch.sources), -1, hidden.shape[-1])
    return jnp.take_along_axis(of_shares, batch.sources[:, :, None], axis=1), counts


def _split_columns(x: jax.Array, columns: int) -> jax.Array:
    """[B, R, ...] -> [R / columns, B, columns, ...], zero-padded; rows stay together, and so on their device."""
    missing = -x.shape[1] % columns
    x = jnp.pad(x, ((0, 0), (0, missing)) + ((0, 0),) * (x.ndim - 2))
    return x.reshape(x.shape[0], -1, columns, *x.shape[2:]).swapaxes(0, 1)


def _join_columns(x: jax.Array, length: int) -> jax.Array:
    """The inverse of `_split_columns` for [chunks, B, columns]."""
    return x.swapaxes(0, 1).reshape(x.shape[1], -1)[:, :length]
