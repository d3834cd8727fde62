"""What moves between the stages. Sizes: Q prompts, G samples each, B = Q * G rows, P prompt, R response tokens."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from dapo_jax.data.work import Work

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
    mask: Array  # [B, R] bool, True on response tokens, end-of-sequence token included
    logprobs: Array  # [B, R] float32, log-probability of each token when it was sampled; 0 where none was
    finished: Array  # [B] bool, False if cut off at R tokens
    by_policy: Array = None  # [B, R] bool, False on response tokens that an environment wrote; None = all the policy's
    # Work by stage ("prefill", "decode"), if the engine counts it
    work: Mapping[str, Work] = struct.field(pytree_node=False, default_factory=dict)


@struct.dataclass
class Batch:
    """Rows to train on. Rows whose masks are all False are padding and change nothing.

    S consecutive rows share a prompt, which is stored and run once. S divides the samples of a group.
    The algorithm decides which of the last fields are set.
    """

    prompts: Array  # [B // S, P] int32, left-padded
    prompt_mask: Array  # [B // S, P] bool
    responses: Array  # [B, R] int32, right-padded
    mask: Array  # [B, R] bool, True on response tokens
    loss_mask: Array  # [B, R] bool, True on tokens to train on, a subset of `mask`
    group_ids: Array  # [B] int32, the group of each row, ascending; of padding, the number of groups
    old_logprobs: Array  # [B, R] float32, the ratio's denominator
    advantages: Array  # [B, R] float32, 0 on padding
    loss_weights: Array = None  # [B, R] float32, each token's share in the loss of its mini-batch
    importance_weights: Array = None  # [B, R] float32, from rollout correction
    ref_logprobs: Array = None  # [B, R] float32, under the reference policy
    noise: Array = None  # [B, R] float32 uniform, for losses that draw tokens
    selected: Array = None  # [B, R] bool, tokens that such a loss has drawn in its mini-batch
    values: Array = None  # [B, R] float32, the critic's before the update
    returns: Array = None  # [B, R] float32, what the critic is fitted to


@struct.dataclass
class Mean:
    """A mean that can be merged: a sum and a count."""

    total: jax.Array
    count: jax.Array

    @classmethod
    def of(cls, values: jax.Array, mask: jax.Array) -> "Mean":
        """Mean of `values` where `mask` is True; values elsewhere, even NaN, do not count."""
        return cls(jnp.sum(values, where=mask, dtype=jnp.float32), jnp.sum(mask, dtype=jnp.float32))

    def merge(self, other: "Mean") -> "Mean":
        return Mean(self.total + other.total, self.count + other.count)

    def across(self, axis: str) -> "Mean":
        """Inside a shard_map: merged over the devices along `axis`."""
        return jax.lax.psum(self, axis)


@struct.dataclass
class Max:
    """The largest of some non-negative values, 0 if there are none."""

    value: jax.Array

    @classmethod
    def of(cls, values: jax.Array, mask: jax.Array) -> "Max":
        """Of `values` where `mask` is True."""
        return cls(jnp.max(values, where=mask, initial=0.0))

    def merge(self, other: "Max") -> "Max":
        return Max(jnp.maximum(self.value, other.value))

    def across(self, axis: str) -> "Max":
        """Inside a shard_map: merged over the devices along `axis`."""
        return jax.lax.pmax(self, axis)
