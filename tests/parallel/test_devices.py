import importlib.util
from types import SimpleNamespace

import jax
import pytest

from dapo_jax.parallel.devices import LIMITS, Limits, devices_of, limits_of
from dapo_jax.parallel.mesh import make_mesh


def limits(kind):
    return limits_of(SimpleNamespace(device_kind=kind))


TPUS = {"TPU v5 lite": "TPU v5e", "TPU v5": "TPU v5p", "TPU v5p": "TPU v5p", "TPU v6 lite": "TPU v6e"}


@pytest.mark.parametrize(("kind", "name"), {**TPUS, "NVIDIA H200": "H200", "NVIDIA A100-SXM4-80GB": "A100"}.items())
def test_the_longest_name_that_fits_is_taken(kind, name):
    assert limits(kind).name == name


def test_an_unknown_device_has_no_limits():
    found = limits("cpu")
    assert found.name == "cpu" and found.memory is None and not found.is_known


@pytest.mark.parametrize("kind", ["NVIDIA L40S", "NVIDIA A100-PCIE-40GB", "NVIDIA H100 PCIe", "NVIDIA GH200 144G"])
def test_a_relative_of_a_known_gpu_is_not_taken_for_it(kind):
    assert not limits(kind).is_known


@pytest.mark.parametrize(
    ("kind", "name", "gigabytes"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100", 80),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB", 40),
        ("NVIDIA H100 80GB HBM3", "H100", 80),
        ("NVIDIA GH200 480GB", "GH200", 96),  # 480 GB are its CPU's
    ],
)
def test_a_gpu_has_its_own_memory_and_not_that_of_a_relative(kind, name, gigabytes):
    found = limits(kind)
    assert found.name == name and gigabytes * 1e9 < found.memory < gigabytes * 1.08e9


def test_products_of_float32_have_limits_of_their_own():
    h100, v5e = LIMITS["NVIDIA H100 80GB HBM3"], LIMITS["TPU v5 lite"]
    assert h100.of_dtype("bfloat16") == h100 and h100.of_dtype("float32").flops == 67e12
    assert v5e.of_dtype("float32").flops == v5e.flops / 6


def test_known_limits_are_whole_and_plausible():
    for of_device in LIMITS.values():
        if of_device.name == "T4":  # no fast bfloat16 products
            assert not of_device.is_known and of_device.of_dtype("float32").is_known
            continue
        assert of_device.is_known and of_device.memory is not None
        assert 10 < of_device.flops / of_device.bandwidth < 1000 < of_device.flops / of_device.link
        assert of_device.network is None or of_device.network < of_device.link


def test_the_cpu_of_this_machine():
    assert devices_of("cpu", 8) == jax.devices()


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        ("v99:2x2", ".* v5e:4x4"),
        ("no-such-thing", ".* v5e:4x4"),
        *((f"h100:{number}", "h100:GPUS or h100:HOSTSxGPUS") for number in ("", "0")),
        *((f"a100:{hosts}", "a100:GPUS or a100:HOSTSxGPUS") for hosts in ("2x", "2x8x2")),
        ("l4:one", "l4:GPUS or l4:HOSTSxGPUS"),
    ],
)
def test_a_topology_that_is_none_is_refused_with_the_cure(topology, message):
    with pytest.raises(ValueError, match=f"--topology={topology} must be {message}"):
        devices_of(topology, 8)


def test_gpus_without_a_name_are_refused_with_all_names():
    with pytest.raises(ValueError, match="must name a GPU that CUDA 13 knows: choose one of t4:8, .* h200:8, b200:8"):
        devices_of("gpu:8", 8)


@pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is not None, reason="JAX's compiler for GPUs is here")
def test_a_gpu_without_its_compiler_is_refused_with_the_packages():
    with pytest.raises(ValueError, match=r"h100:8 needs .*: pip install 'dapo_jax\[cuda13\]', or, .*--no-deps"):
        devices_of("h100:8", 8)


def test_a_collective_between_hosts_goes_as_fast_as_the_network_cards_of_its_devices():
    device = Limits("device", 1.0, 1.0, 1.0, link=450.0, network=50.0)
    assert device.speed(8, 8) == 450.0
    assert device.speed(16, 8) == 400.0 and device.speed(4, 2) == 100.0 and device.speed(4, 1) == 50.0
    assert Limits("TPU", 1.0, 1.0, 1.0, link=90.0).speed(16, 4) == 90.0


def test_a_mesh_that_a_slice_cannot_hold_is_refused_with_the_cure(monkeypatch):
    def refuse(*_, **__):
        raise NotImplementedError("Failed to find assignment")

    monkeypatch.setattr(jax, "make_mesh", refuse)
    message = "mesh.data=1, mesh.fsdp=8, mesh.tensor=1 cannot be laid out on this slice: choose axes that are products"
    with pytest.raises(ValueError, match=message):
        make_mesh(1, 8, 1)
