"""Host: floating-point operations of a pass over tokens, from an architecture alone."""

import math
from dataclasses import dataclass

from dapo_jax.models.architecture import Architecture
from dapo_jax.models.weights import weight_table


@dataclass(frozen=True)
class TokenFlops:
    """Operations of a forward pass, 2 for each multiplication of a matrix product. A backward pass has twice as many.

    Norms, rotations, exponentials and the look-up of embeddings are not counted.
    """

    layers: float  # a token through the matrices of all layers
    head: float  # the vocabulary's scores for a token
    pair: float  # a token that attends to a key, in all layers


def token_flops(arch: Architecture) -> TokenFlops:
    """The operations per token and per pair of a query and a key."""
    return TokenFlops(
        layers=2.0
        * sum(math.prod(weight.shape) for weight in weight_table(arch) if weight.stacked and weight.is_matrix),
        head=2.0 * arch.vocab_size * arch.hidden_size,
        pair=4.0 * arch.num_layers * arch.num_heads * arch.head_dim,
    )
