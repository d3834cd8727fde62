"""Device: a mixture of experts: each token goes to a few of many feed-forward networks (arXiv:1701.06538)."""

import jax
import jax.numpy as jnp
from flax import struct

from dapo_jax.models.attention import matmul


@struct.dataclass
class Routing:
    """What a layer's router did. Sizes: B rows, T tokens, E experts, k of them for a token."""

    chosen: jax.Array  # [B, T, k] int32, experts used
    probabilities: jax.Array  # [B, T, E] float32
    own: jax.Array | None = None  # [B, T, k] what the router would have chosen, where `chosen` is replayed


def expert_feed_forward(x, router, gate, up, down, *, experts_per_token, normalized, replayed=None):
    probabilities = jax.nn.softmax(matmul("btd,de->bte", x, router))
    weights, chosen = jax.lax.top_k(probabilities, experts_per_token)
    own = None
    if replayed is not None:
        own, chosen = chosen, jnp.where(replayed < 0, chosen, replayed)
        weights = jnp.take_along_axis(probabilities, chosen, axis=-1)
    if normalized:
        weights = weights / weights.sum(-1, keepdims=True)
    dense = jnp.sum(jax.nn.one_hot(chosen, len(gate)) * weights[..., None], axis=-2)
    hidden = jax.nn.silu(matmul("btd,edf->btef", x, gate)) * matmul("btd,edf->btef", x, up)
    return jnp.einsum("bted,bte->btd", matmul("btef,efd->bted", hidden, down), dense), Routing(
        chosen, probabilities, own
    )
