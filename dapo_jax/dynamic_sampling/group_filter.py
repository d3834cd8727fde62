"""Device: which groups have something to compare (DAPO, section 3.2, equation 11)."""

import functools

import jax
import jax.numpy as jnp
from flax import struct

from dapo_jax.config.sections import FilterGroupsConfig
from dapo_jax.errors import InputError
from dapo_jax.parallel.ordered_sums import segment_sum


@struct.dataclass
class GroupStatistics:
    """A metric over the samples of each prompt, [Q] each."""

    count: jax.Array  # samples
    mean: jax.Array
    std: jax.Array  # population standard deviation; exactly 0 where all values are equal
    min: jax.Array
    max: jax.Array


@functools.partial(jax.jit, static_argnames=("num_groups",))
def group_statistics(values: jax.Array, group_ids: jax.Array, *, num_groups: int) -> GroupStatistics:
    """Statistics of `values` [B] over the rows of each group; group_ids [B] in [0, num_groups), in any order."""
    count = segment_sum(jnp.ones_like(values), group_ids, num_groups)
    mean = segment_sum(values, group_ids, num_groups) / jnp.maximum(count, 1)
    deviation = values - mean[group_ids]
    variance = segment_sum(jnp.square(deviation), group_ids, num_groups) / jnp.maximum(count, 1)
    lowest = jax.ops.segment_min(values, group_ids, num_groups)
    highest = jax.ops.segment_max(values, group_ids, num_groups)
    std = jnp.where(highest > lowest, jnp.sqrt(variance), 0.0)
    return GroupStatistics(count, mean, std, lowest, highest)


RULES = {"std": ("std_threshold",), "mean_range": ("filter_low", "filter_high"), "mixed": ()}  # and what each reads


def keep_groups(statistics: GroupStatistics, options: FilterGroupsConfig) -> jax.Array:
    """True [Q] for groups that are kept. A group of one sample is kept with `keep_singletons`, whatever its value.

        std         the population standard deviation is above std_threshold. At 0, max > min: a spread computed
                    through a rounded mean is not exactly 0 for equal values
        mean_range  filter_low < mean < filter_high (EasyR1)
        mixed       some values are positive and some are not: 0 < right answers < G (DAPO, equation 11)

    Raises:
        ValueError: an unknown rule.
    """
    if options.rule == "std":
        differ = statistics.max > statistics.min
        kept = differ if options.std_threshold == 0 else statistics.std > options.std_threshold
    elif options.rule == "mean_range":
        kept = (options.filter_low < statistics.mean) & (statistics.mean < options.filter_high)
    elif options.rule == "mixed":
        kept = (statistics.max > 0) & (statistics.min <= 0)
    else:
        raise InputError(f"algorithm.filter_groups.rule={options.rule!r} must be one of {', '.join(RULES)}")
    return jnp.where(statistics.count == 1, options.keep_singletons, kept)
