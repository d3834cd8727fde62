import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.config.sections import FilterGroupsConfig
from dapo_jax.dynamic_sampling.group_filter import RULES, group_statistics, keep_groups
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.parallel.sharding import put_rows

STD = FilterGroupsConfig()


def statistics(groups):
    values = jnp.array(np.concatenate(groups), jnp.float32)
    ids = jnp.array(np.repeat(np.arange(len(groups)), [len(group) for group in groups]))
    return group_statistics(values, ids, num_groups=len(groups))


@pytest.mark.parametrize("count", [3, 5, 6, 7, 8, 12, 16])
@pytest.mark.parametrize("value", [0.1, 0.7, -1.3, 1e-7, 1.0, 0.0])
def test_equal_values_are_dropped_whatever_they_are(count, value):
    found = statistics([[value] * count])
    assert not keep_groups(found, STD)[0] and found.std[0] == 0


def test_the_smallest_difference_is_kept():
    next_value = np.nextafter(np.float32(0.1), np.float32(1))
    assert keep_groups(statistics([[0.1] * 7 + [next_value]]), STD)[0]


def test_population_standard_deviation():
    found = statistics([[1, 0, 1, 0, 1, 0, 1, 1], [1, 1, 1, 1, 1, 1, 0, 1]])
    np.testing.assert_allclose(found.std, [0.484, 0.331], atol=5e-4)
    np.testing.assert_allclose(found.mean, [0.625, 0.875])


def test_a_group_of_one_is_kept():
    assert keep_groups(statistics([[0.0], [1.0, 1.0]]), STD).tolist() == [True, False]


def test_the_order_of_rows_does_not_matter():
    values, ids = jnp.array([0.0, 1.0, 1.0, 1.0, 0.0, 0.0]), jnp.array([0, 1, 2, 1, 0, 2])
    assert keep_groups(group_statistics(values, ids, num_groups=3), STD).tolist() == [False, False, True]


def test_a_sharded_call_gives_the_same():
    mesh = make_mesh(2, 2, 2)
    values = np.random.default_rng(0).integers(0, 2, size=24).astype(np.float32)
    ids = np.repeat(np.arange(8), 3).astype(np.int32)
    with jax.set_mesh(mesh):
        sharded = group_statistics(put_rows(values, mesh), put_rows(ids, mesh), num_groups=8)
    plain = group_statistics(jnp.array(values), jnp.array(ids), num_groups=8)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(sharded), jax.device_get(plain))


def kept(values, **rule):
    return keep_groups(statistics(values), FilterGroupsConfig(**rule)).tolist()


def test_a_threshold_on_the_spread():
    groups = [[0.0, 0.1, 0.0, 0.1], [0.0, 1.0, 0.0, 1.0], [2.0] * 4]  # standard deviations 0.05, 0.5 and 0
    assert kept(groups, std_threshold=0.1) == [False, True, False]
    assert kept(groups, std_threshold=0.01) == [True, True, False]


def test_the_range_of_the_mean_is_open():
    groups = [[0.0, 0.0], [0.5, 0.0], [0.5, 0.5], [1.0, 0.5], [1.0, 1.0]]
    assert kept(groups, rule="mean_range") == [False, True, True, True, False]
    assert kept(groups, rule="mean_range", filter_low=0.25, filter_high=0.75) == [False, False, True, False, False]


def test_mixed_means_that_some_are_right_and_some_are_not():
    groups = [[1.0, -1.0], [1.0, 0.0], [1.0, 0.5], [0.0, -1.0], [1.0, 1.0], [0.0, 0.0]]
    assert kept(groups, rule="mixed") == [True, True, False, False, False, False]


@pytest.mark.parametrize("name", RULES)
def test_groups_of_one_are_kept_as_the_rule_says(name):
    for keep in (True, False):
        assert kept([[0.0], [1.0]], rule=name, keep_singletons=keep) == [keep, keep]


def test_an_unknown_rule_is_refused():
    with pytest.raises(ValueError, match="rule='variance' must be one of std, mean_range, mixed"):
        kept([[0.0, 1.0]], rule="variance")
