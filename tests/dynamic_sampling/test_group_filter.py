import jax
import numpy as np
import pytest

from dapo_jax.config.sections import FilterGroupsConfig
from dapo_jax.dynamic_sampling.group_filter import RULES, group_statistics, keep_groups
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.parallel.sharding import put_rows

NEXT = float(np.nextafter(np.float32(0.1), np.float32(1)))


def statistics(groups):
    values = np.concatenate(groups).astype(np.float32)
    ids = np.repeat(np.arange(len(groups), dtype=np.int32), [len(group) for group in groups])
    return group_statistics(values, ids, num_groups=len(groups))


def test_equal_values_are_dropped_whatever_they_are():
    values = [0.1, 0.7, -1.3, 1e-7, 1.0, 0.0]
    found = statistics([[value] * count for count in (3, 5, 6, 7, 8, 12, 16) for value in values])
    assert not keep_groups(found, FilterGroupsConfig()).any() and not np.any(found.std)


def test_population_standard_deviation():
    found = statistics([[1, 0, 1, 0, 1, 0, 1, 1], [1, 1, 1, 1, 1, 1, 0, 1]])
    np.testing.assert_allclose(found.std, [0.484, 0.331], atol=5e-4)
    np.testing.assert_allclose(found.mean, [0.625, 0.875])


def test_neither_the_order_of_rows_nor_the_devices_matter():
    mesh = make_mesh(2, 2, 2)
    values = np.random.default_rng(0).integers(0, 2, size=24).astype(np.float32)
    ids = np.repeat(np.arange(8), 3).astype(np.int32)
    plain = jax.device_get(group_statistics(values, ids, num_groups=8))
    order = np.random.default_rng(1).permutation(24)
    with jax.set_mesh(mesh):
        sharded = group_statistics(put_rows(values, mesh), put_rows(ids, mesh), num_groups=8)
    for found in (sharded, group_statistics(values[order], ids[order], num_groups=8)):
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), plain)


def kept(values, **rule):
    return keep_groups(statistics(values), FilterGroupsConfig(**rule)).tolist()


SPREADS = [[0.0, 0.1, 0.0, 0.1], [0.0, 1.0, 0.0, 1.0], [2.0] * 4]  # standard deviations 0.05, 0.5 and 0
MEANS = [[0.0, 0.0], [0.5, 0.0], [0.5, 0.5], [1.0, 0.5], [1.0, 1.0]]


@pytest.mark.parametrize(
    ("groups", "rule", "expected"),
    [
        pytest.param([[0.1] * 7 + [NEXT], [0.1] * 8], {}, [1, 0], id="the smallest difference is kept"),
        pytest.param([[0.0], [1.0, 1.0]], {}, [1, 0], id="a group of one is kept"),
        pytest.param(SPREADS, {"std_threshold": 0.1}, [0, 1, 0], id="a high threshold on the spread"),
        pytest.param(SPREADS, {"std_threshold": 0.01}, [1, 1, 0], id="a low threshold on the spread"),
        pytest.param(MEANS, {"rule": "mean_range"}, [0, 1, 1, 1, 0], id="the range of the mean"),
        pytest.param(
            MEANS, {"rule": "mean_range", "filter_low": 0.25, "filter_high": 0.75}, [0, 0, 1, 0, 0], id="is open"
        ),
        pytest.param(
            [[1.0, -1.0], [1.0, 0.0], [1.0, 0.5], [0.0, -1.0], [1.0, 1.0], [0.0, 0.0]],
            {"rule": "mixed"},
            [1, 1, 0, 0, 0, 0],
            id="mixed: some are right and some are not",
        ),
        *(
            pytest.param([[0.0], [1.0]], {"rule": rule, "keep_singletons": keep}, [keep] * 2, id=f"one, {rule}, {keep}")
            for rule in RULES
            for keep in (True, False)
        ),
    ],
)
def test_rules_keep_groups(groups, rule, expected):
    assert kept(groups, **rule) == [bool(keep) for keep in expected]


def test_an_unknown_rule_is_refused():
    with pytest.raises(ValueError, match="rule='variance' must be one of std, mean_range, mixed"):
        kept([[0.0, 1.0]], rule="variance")
