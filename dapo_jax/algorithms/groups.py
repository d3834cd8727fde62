"""Device: statistics over the responses to one prompt."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from dapo_jax.parallel.ordered_sums import segment_sum


class Groups:
    """Statistics of each row's group, [B] -> [B]."""

    def __init__(self, group_ids: jax.Array, num_groups: int) -> None:
        self.ids, self.num_groups = group_ids, num_groups
        self.real = (group_ids >= 0) & (group_ids < num_groups)  # not padding
        self.count = self.sum(jnp.ones_like(group_ids, jnp.float32))
        self.single = self.count == 1

    def _over(self, reduce: Callable[..., jax.Array], values: jax.Array) -> jax.Array:
        return reduce(values, self.ids, self.num_groups)[self.ids]

    def sum(self, values: jax.Array) -> jax.Array:
        return self._over(segment_sum, values)

    def highest(self, values: jax.Array) -> jax.Array:
        return self._over(jax.ops.segment_max, values)

    def lowest(self, values: jax.Array) -> jax.Array:
        return self._over(jax.ops.segment_min, values)

    def mean(self, values: jax.Array) -> jax.Array:
        return self.sum(values) / self.count

    def centred(self, values: jax.Array) -> jax.Array:
        """Distance from the group's mean: exactly 0 among equals, the value itself if it is alone."""
        return jnp.where(self.uniform(values), 0.0, values - jnp.where(self.single, 0.0, self.mean(values)))

    def deviation(self, values: jax.Array) -> jax.Array:
        """Sample standard deviation; 1 for a group of one."""
        variance = self.sum(jnp.square(values - self.mean(values))) / jnp.maximum(self.count - 1, 1)
        return jnp.where(self.single, 1.0, jnp.sqrt(variance))

    def uniform(self, values: jax.Array) -> jax.Array:
        """Several values, all equal."""
        return ~self.single & (self.highest(values) == self.lowest(values))
