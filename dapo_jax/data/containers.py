"""What moves between the stages.

Sizes: Q prompts, G samples each, B = Q * G rows, P prompt tokens, R response tokens; packed, N bins of T slots with U
response tokens each.
"""

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
    # The experts that tokens went to when they were sampled, -1 = not known, if they are recorded (docs/inside.md)
    experts: Any = None  # B arrays [tokens - 1, l, k]: the last token of a response was not fed to the model
    prompt_experts: Any = None  # Q arrays [tokens, l, k]; None too if an earlier policy has begun the responses
    # Work by stage ("prefill", "decode"), if the engine counts it
    work: Mapping[str, Work] = struct.field(pytree_node=False, default_factory=dict)


@struct.dataclass
class Tokens:
    """Response tokens with what the losses need of each. The algorithm decides which of the last fields are set.

    In a `Batch` each row is a response: [B, R]. In a `MicroBatch` those of each share of the devices follow each other:
    [S, U].
    """

    responses: Array  # int32
    mask: Array  # bool, True on response tokens
    loss_mask: Array  # bool, True on tokens to train on, a subset of `mask`
    old_logprobs: Array  # float32, the ratio's denominator
    advantages: Array  # float32, 0 on padding
    by_policy: Array = None  # bool, those of `mask` that the policy wrote; None = all
    sampled_logprobs: Array = None  # float32, the sampler's, if `old_logprobs` are recomputed and a mask needs these
    loss_weights: Array = None  # float32, each token's share in the loss of its mini-batch
    importance_weights: Array = None  # float32, from rollout correction
    ref_logprobs: Array = None  # float32, under the reference policy
    candidates: Array = None  # int32 [..., K], the student's most likely tokens, if a teacher's are compared
    teacher_logprobs: Array = None  # float32 [..., K], of the candidates under the teacher
    noise: Array = None  # float32 uniform, for losses that draw tokens
    selected: Array = None  # bool, tokens that such a loss has drawn in its mini-batch
    values: Array = None  # float32, the critic's before the update
    returns: Array = None  # float32, what the critic is fitted to

    @property
    def policy_mask(self) -> Array:
        """bool, True on response tokens that the policy wrote: all others have no log-probability."""
        return self.mask if self.by_policy is None else self.by_policy


@struct.dataclass(kw_only=True)
class Batch(Tokens):
    """Rows to train on, whole groups in prompt order: row b answers prompt b // (B // Q).

    Rows whose masks are all False are padding and change nothing.
    """

    prompts: Array  # [Q, P] int32, left-padded
    prompt_mask: Array  # [Q, P] bool
    group_ids: Array  # [B] int32, the group of each row, ascending but for padding: the number of groups
    experts: Array = None  # [B] objects: what the rollout has of each response, a NumPy array
    prompt_experts: Array = None  # [Q] objects: of each prompt


@struct.dataclass
class Bins:
    """Sequences packed into N bins of T slots. Padding comes last in a bin.

    A tree is a prompt and, behind it, some of its responses. Each response is a branch: it sees the prompt and itself.
    """

    tokens: Array  # [N, T] int32
    positions: Array  # [N, T] int32, in the sequence of prompt and response
    trees: Array  # [N, T] int32, numbered from 1 in each bin; 0 on padding
    branches: Array  # [N, T] int32, numbered from 1 in each bin; 0 on prompts and padding
    experts: Array = None  # [N, T, l, k] int, those that each token must use in the l layers that have some; -1 = any
    # what some implementations of attention need besides
    lengths: Array = None  # [N, M] int32, slots of each tree
    ranges: Array = None  # [N, 4, T] int32, the slots that each slot sees and is seen by, as in tree_ranges.py
    queries: Array = None  # [N, T] int32, what each slot sees, as splash encodes it
    prompt_slots: Array = None  # [N, W] int32, slots of prompts that several responses share, -1 on padding
    blocks: Array = None  # [N, T / block, (T + W) / block] int8, 1 where a query of a block sees one of its keys


@struct.dataclass(kw_only=True)
class MicroBatch(Tokens):
    """What one forward and backward pass takes: the bins, and the response tokens that they predict.

    Each of S shares of the devices has N // S consecutive bins.
    """

    bins: Bins
    sources: Array  # [S, U] int32, which of the share's slots has the hidden state that predicts each response token
    sequences: Array  # [S, U] int32, the sequence of each response token, numbered from 1; 0 on padding


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
