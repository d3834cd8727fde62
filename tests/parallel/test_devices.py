import importlib.util
from types import SimpleNamespace

import jax
import pytest

from dapo_jax.parallel.devices import LIMITS, Limits, devices_of, limits_of


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("TPU v5 lite", "TPU v5e"), ("TPU v5", "TPU v5p"), ("TPU v5p", "TPU v5p"), ("TPU v6 lite", "TPU v6e"),
        ("NVIDIA H200", "H200"), ("NVIDIA A100-SXM4-40GB", "A100"), ("Tesla T4", "T4"), ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "NVIDIA L40S"), ("NVIDIA GeForce RTX 4090", "RTX 4090"),
    ],
)  # fmt: skip
def test_the_longest_name_that_fits_is_taken(kind, name):
    assert limits_of(SimpleNamespace(device_kind=kind)).name == name


def test_an_unknown_device_has_no_limits():
    limits = limits_of(SimpleNamespace(device_kind="cpu"))
    assert limits.name == "cpu" and limits.memory is None and not limits.is_known


def test_known_limits_are_whole_and_plausible():
    for limits in LIMITS.values():
        assert limits.is_known and limits.memory is not None
        of_bfloat16 = limits.name != "T4"  # whose float32 products are ten times slower
        of_bandwidth, of_link = limits.flops / limits.bandwidth, limits.flops / limits.link  # pyright: ignore
        assert 10 < of_bandwidth < 1000 and (of_link > 1000 if of_bfloat16 else of_link > 100)
        assert limits.network is None or limits.network < limits.link  # pyright: ignore


def test_the_cpu_of_this_machine():
    assert devices_of("cpu", 8) == jax.devices()


@pytest.mark.parametrize("topology", ["v99:2x2", "no-such-thing"])
def test_an_unknown_topology_is_refused_with_the_cure(topology):
    with pytest.raises(ValueError, match=rf"--topology={topology} must be .* v5e:4x4"):
        devices_of(topology, 8)


@pytest.mark.parametrize("topology", ["h100:", "h100:0", "a100:2x", "a100:2x8x2", "l4:one"])
def test_a_number_of_gpus_that_is_none_is_refused(topology):
    name = topology.partition(":")[0]
    with pytest.raises(ValueError, match=rf"--topology={topology} must be {name}:GPUS or {name}:HOSTSxGPUS"):
        devices_of(topology, 8)


def test_gpus_without_a_name_are_refused_with_all_names():
    with pytest.raises(ValueError, match="must name the GPU: choose one of t4:8, .* h100:8, h200:8, b200:8"):
        devices_of("gpu:8", 8)


@pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is not None, reason="JAX's compiler for GPUs is here")
def test_a_gpu_without_its_compiler_is_refused_with_the_packages():
    with pytest.raises(ValueError, match=r"h100:8 needs .*: pip install 'dapo_jax\[cuda13\]', or .*--no-deps"):
        devices_of("h100:8", 8)


def test_a_collective_between_hosts_goes_as_fast_as_the_network_cards_of_its_devices():
    device = Limits("device", 1.0, 1.0, 1.0, link=450.0, network=50.0)
    assert device.speed(8, 8) == 450.0
    assert device.speed(16, 8) == 400.0 and device.speed(4, 2) == 100.0 and device.speed(4, 1) == 50.0
    assert Limits("TPU", 1.0, 1.0, 1.0, link=90.0).speed(16, 4) == 90.0
