"""Device: which groups have something to compare (DAPO, section 3.2, equation 11)."""

import functools

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class GroupStatistics:
    """A metric over the samples of each prompt, [Q] each."""

    count: jax.Array  # samples
    mean: jax.Array
    std: jax.Array  # population standard deviation, for reporting: the filter compares max with min
    min: jax.Array
    max: jax.Array


@functools.partial(jax.jit, static_argnames=("num_groups",))
def group_statistics(values: jax.Array, group_ids: jax.Array, *, num_groups: int) -> GroupStatistics:
    """Statistics of `values` [B] over the rows of each group; group_ids [B] in [0, num_groups), in any order."""
    count = jax.ops.segment_sum(jnp.ones_like(values), group_ids, num_groups)
    mean = jax.ops.segment_sum(values, group_ids, num_groups) / jnp.maximum(count, 1)
    deviation = values - mean[group_ids]
    variance = jax.ops.segment_sum(jnp.square(deviation), group_ids, num_groups) / jnp.maximum(count, 1)
    lowest = jax.ops.segment_min(values, group_ids, num_groups)
    highest = jax.ops.segment_max(values, group_ids, num_groups)
    std = jnp.where(highest > lowest, jnp.sqrt(variance), 0.0)
    return GroupStatistics(count, mean, std, lowest, highest)


def keep_groups(statistics: GroupStatistics) -> jax.Array:
    """True [Q] for groups whose values differ, and for groups of one.

    Compares max with min: a spread computed through a rounded mean is not exactly 0 for equal values.
    """
    return (statistics.max > statistics.min) | (statistics.count == 1)
