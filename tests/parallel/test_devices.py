import importlib.util
from types import SimpleNamespace

import jax
import pytest

from dapo_jax.parallel.devices import LIMITS, Limits, devices_of, limits_of
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.parallel.slices import libtpu_name, slice_devices


@pytest.mark.parametrize(
    ("kind", "name", "gigabytes"),
    [
        ("TPU v5 lite", "TPU v5e", 17),
        ("TPU v5", "TPU v5p", 102),
        ("TPU v5p", "TPU v5p", 102),
        ("TPU v6 lite", "TPU v6e", 34),
        ("NVIDIA H200", "H200", 151),
        ("NVIDIA A100-SXM4-80GB", "A100", 85),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB", 42),
        ("NVIDIA H100 80GB HBM3", "H100", 85),
        ("NVIDIA GH200 480GB", "GH200", 103),  # 480 GB are its CPU's
        *((kind, kind, None) for kind in ("cpu", "NVIDIA L40S", "NVIDIA H100 PCIe", "NVIDIA GH200 144G")),
    ],
)
def test_a_device_is_known_by_the_longest_name_and_is_not_taken_for_a_relative(kind, name, gigabytes):
    found = limits_of(SimpleNamespace(device_kind=kind))
    assert found.name == name and found.is_known == (gigabytes is not None)
    assert (found.memory and round(found.memory / 1e9)) == gigabytes


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


SLICES = {  # by name: sides and chips
    **{"v5e-1": ("v5e:1x1", 1), "v5e-4": ("v5e:2x2", 4), "v5e-8": ("v5e:2x4", 8), "v5litepod-16": ("v5e:4x4", 16)},
    **{"v5e-128": ("v5e:8x16", 128), "v6e-256": ("v6e:16x16", 256), "v4-8": ("v4:2x2x1", 4), "v4-32": ("v4:2x2x4", 16)},
    **{"v5p-8": ("v5p:2x2x1", 4), "v5p-16": ("v5p:2x2x2", 8), "v5p-64": ("v5p:2x4x4", 32)},
    **{"v5p-128": ("v5p:4x4x4", 64), "v4-4096": ("v4:8x16x16", 2048)},
}


def test_a_slice_is_known_by_its_name_in_google_cloud():
    """v4 and v5p count cores, two per chip; v5e and v6e count chips."""
    for name, (sides, chips) in SLICES.items():
        assert libtpu_name(name) == sides
        if importlib.util.find_spec("libtpu") is not None:
            assert len(slice_devices(sides)) == chips
    for name in ("v5p:4x4x8", "h100:8", "cpu", "tpu", "v5e:2x4", "v7-8"):
        assert libtpu_name(name) == name


@pytest.mark.parametrize(
    ("name", "choice"),
    [("v5e-12", "v5e-8 or v5e-16"), ("v5p-4", "v5p-8 or v5p-16"), ("v6e-1000", "v6e-128 or v6e-256")],
)
def test_an_unknown_size_is_refused_with_the_closest_ones(name, choice):
    with pytest.raises(ValueError, match=f"--topology={name} .*choose {choice}, or give its sides"):
        libtpu_name(name)


@pytest.mark.parametrize("topology", ["v5e-8", "v5p:2x2x1"])
def test_without_libtpu_a_slice_names_the_package(topology, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    def missing(topology):
        raise RuntimeError("libtpu.so is not there")

    monkeypatch.setattr("dapo_jax.parallel.devices.slice_devices", missing)
    with pytest.raises(ValueError, match=f"--topology={topology} needs libtpu, .*pip install 'dapo_jax.tpu-preflight"):
        devices_of(topology, 1)
