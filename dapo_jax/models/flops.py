"""Host: floating-point operations of a pass over tokens, from an architecture alone."""

import math
from dataclasses import dataclass

import numpy as np

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

    def of_prompts(self, prompts: np.ndarray) -> float:
        """Each token of the prompts [Q] once, under causal attention. Their scores of the vocabulary are not counted.

        Args:
            prompts: tokens of each.
        """
        pairs = prompts * (prompts + 1.0) / 2
        return float(self.layers * prompts.sum() + self.pair * pairs.sum())

    def of_responses(self, prompts: np.ndarray, responses: np.ndarray) -> float:
        """Each token of the responses [Q, G] but the last, which predicts nothing, with scores of the vocabulary.

        A token attends to its prompt and to the response up to itself.

        Args:
            prompts, responses: tokens of each.
        """
        steps = np.maximum(responses - 1.0, 0)
        pairs = steps * prompts[:, None] + steps * (steps + 1) / 2
        return float((self.layers + self.head) * steps.sum() + self.pair * pairs.sum())


def token_flops(arch: Architecture) -> TokenFlops:
    """The operations per token and per pair of a query and a key."""
    return TokenFlops(
        layers=2.0
        * sum(math.prod(weight.shape) for weight in weight_table(arch) if weight.stacked and weight.is_matrix),
        head=2.0 * arch.vocab_size * arch.hidden_size,
        pair=4.0 * arch.num_layers * arch.num_heads * arch.head_dim,
    )
