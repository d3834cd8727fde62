"""Host: floating-point operations of a pass over tokens, from an architecture alone."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dapo_jax.models.architecture import Architecture
from dapo_jax.models.attention import keys_at_once
from dapo_jax.models.weights import Weight, weight_table


@dataclass(frozen=True)
class TokenFlops:
    """Operations of a forward pass, 2 for each multiplication of a matrix product. A backward pass has twice as many.

    Norms, rotations, exponentials and the look-up of embeddings are not counted.
    """

    layers: float  # a token through the matrices of all layers
    head: float  # the vocabulary's scores for a token
    pair: float  # a token that attends to a key, in all layers with attention
    windows: tuple[tuple[int | None, float], ...] = ((None, 1.0),)  # each window, and the share of layers that have it

    def mean(self, of_window: Callable[[int | None], Any]) -> Any:
        """A number that depends on a layer's window, such as its keys, in the mean over layers."""
        return sum(share * of_window(window) for window, share in self.windows)

    def causal_pairs(self, lengths: np.ndarray) -> np.ndarray:
        """Pairs of a query and a key of whole sequences, in the mean over layers."""
        return self.mean(lambda window: causal_pairs(lengths, window))

    def of_prefilled(self, width: int) -> float:
        """A token of a sequence of this width, as `causal_attention` computes it. Without scores of the vocabulary."""
        return self.layers + self.pair * self.mean(lambda window: keys_at_once(width, window))

    def of_prompts(self, prompts: np.ndarray) -> float:
        """Each token of the prompts [Q] once, under causal attention. Their scores of the vocabulary are not counted.

        Args:
            prompts: tokens of each.
        """
        return float(self.layers * prompts.sum() + self.pair * self.causal_pairs(prompts).sum())

    def of_responses(self, prompts: np.ndarray, responses: np.ndarray) -> float:
        """Each token of the responses [Q, G] but the last, which predicts nothing, with scores of the vocabulary.

        A token attends to its prompt and to the response up to itself.

        Args:
            prompts, responses: tokens of each.
        """
        steps = np.maximum(responses - 1.0, 0)
        pairs = self.causal_pairs(prompts[:, None] + steps) - self.causal_pairs(prompts)[:, None]
        return float((self.layers + self.head) * steps.sum() + self.pair * pairs.sum())


def causal_pairs(lengths: np.ndarray, window: int | None = None) -> np.ndarray:
    """Pairs of a token and one that it sees, for sequences of so many tokens; window as in Scores."""
    beyond = 0 if window is None else np.maximum(lengths - window, 0.0)  # keys that the last token does not reach
    return lengths * (lengths + 1.0) / 2 - beyond * (beyond + 1) / 2


@functools.cache
def token_flops(arch: Architecture) -> TokenFlops:
    """The operations per token and per pair of a query and a key."""
    windows = [kind.window for kind in arch.layers if not kind.delta]
    recurrent = 0.0 if arch.delta is None else arch.delta.flops * (arch.num_layers - len(windows))
    matrices = [weight for weight in weight_table(arch) if weight.stacked and weight.is_matrix]
    return TokenFlops(
        layers=2.0 * sum(_used(weight, arch) for weight in matrices) + recurrent,
        head=2.0 * arch.vocab_size * arch.hidden_size,
        pair=4.0 * len(windows) * arch.num_heads * arch.head_dim,
        windows=tuple((window, windows.count(window) / len(windows)) for window in dict.fromkeys(windows)),
    )


def _used(weight: Weight, arch: Architecture) -> float:
    """Elements that a token is multiplied with: those of some experts only."""
    size = math.prod(weight.shape)
    if not weight.num_experts or arch.experts is None:
        return size
    return size * arch.experts.per_token / weight.num_experts
