from types import SimpleNamespace

import jax
import pytest

from dapo_jax.parallel.devices import LIMITS, devices_of, limits_of


@pytest.mark.parametrize(
    ("kind", "name"),
    [("TPU v5 lite", "TPU v5e"), ("TPU v5", "TPU v5p"), ("TPU v6 lite", "TPU v6e"), ("NVIDIA H200", "H200")],
)
def test_the_longest_name_that_fits_is_taken(kind, name):
    assert limits_of(SimpleNamespace(device_kind=kind)).name == name


def test_an_unknown_device_has_no_limits():
    limits = limits_of(SimpleNamespace(device_kind="cpu"))
    assert limits.name == "cpu" and limits.memory is None and not limits.is_known


def test_known_limits_are_whole_and_plausible():
    for limits in LIMITS.values():
        assert limits.is_known and limits.memory is not None
        of_bfloat16 = limits.name not in ("V100", "T4")  # whose float32 products are ten times slower
        of_bandwidth, of_link = limits.flops / limits.bandwidth, limits.flops / limits.link  # pyright: ignore
        assert 10 < of_bandwidth < 1000 and (of_link > 1000 if of_bfloat16 else of_link > 100)
        assert limits.network is None or limits.network < limits.link  # pyright: ignore


def test_the_cpu_of_this_machine():
    assert devices_of("cpu", 8) == jax.devices()


@pytest.mark.parametrize("topology", ["v99:2x2", "no-such-thing"])
def test_an_unknown_topology_is_refused_with_the_cure(topology):
    with pytest.raises(ValueError, match=rf"--topology={topology} must be .* v5e:4x4"):
        devices_of(topology, 8)
