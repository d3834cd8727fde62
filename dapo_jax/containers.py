"""What moves between the stages. Sizes: Q prompts, G samples each, B = Q * G rows, P prompt, R response tokens."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

Array = Any  # jax.Array on the devices, np.ndarray on the host


@struct.dataclass
class Prompts:
    """Q prompts, left-padded to P tokens."""

    tokens: Array  # [Q, P] int32
    mask: Array  # [Q, P] bool, True on real tokens
    numbers: Array  # [Q] int32, address of each prompt's random draws


@struct.dataclass
class Rollout:
    """G responses to each of Q prompts: row b answers prompt b // G."""

    responses: Array  # [B, R] int32, right-padded
    mask: Array  # [B, R] bool, True on sampled tokens, end-of-sequence token included
    logprobs: Array  # [B, R] float32, log-probability of each token when it was sampled; 0 on padding
    finished: Array  # [B] bool, False if cut off at R tokens


@struct.dataclass
class Batch:
    """Rows to train on. Rows whose mask is all False are padding and change nothing.

    S consecutive rows share a prompt: it stands once, and is run once. S divides the samples of a group.
    """

    prompts: Array  # [B // S, P] int32, left-padded
    prompt_mask: Array  # [B // S, P] bool
    responses: Array  # [B, R] int32, right-padded
    mask: Array  # [B, R] bool, True on tokens to train on
    old_logprobs: Array  # [B, R] float32, the ratio's denominator
    advantages: Array  # [B, R] float32, 0 on padding


@struct.dataclass
class Mean:
    """A mean that can be merged: the sum of some values and how many they are."""

    total: jax.Array
    count: jax.Array

    @classmethod
    def of(cls, values: jax.Array, mask: jax.Array) -> "Mean":
        """Mean of `values` where `mask` is True; what stands elsewhere, even NaN, does not count."""
        return cls(jnp.sum(values, where=mask, dtype=jnp.float32), jnp.sum(mask, dtype=jnp.float32))

    def merge(self, other: "Mean") -> "Mean":
        return Mean(self.total + other.total, self.count + other.count)
