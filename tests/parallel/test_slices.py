import importlib.util

import pytest

from dapo_jax.parallel.devices import devices_of
from dapo_jax.parallel.slices import libtpu_name, slice_devices

SLICES = {  # by name: sides and chips
    **{"v5e-1": ("v5e:1x1", 1), "v5e-4": ("v5e:2x2", 4), "v5e-8": ("v5e:2x4", 8), "v5litepod-16": ("v5e:4x4", 16)},
    **{"v5e-128": ("v5e:8x16", 128), "v6e-256": ("v6e:16x16", 256), "v4-8": ("v4:2x2x1", 4), "v4-32": ("v4:2x2x4", 16)},
    **{"v5p-8": ("v5p:2x2x1", 4), "v5p-16": ("v5p:2x2x2", 8), "v5p-64": ("v5p:2x4x4", 32)},
    **{"v5p-128": ("v5p:4x4x4", 64), "v4-4096": ("v4:8x16x16", 2048)},
}


@pytest.mark.parametrize("name", SLICES)
def test_a_slice_is_known_by_its_name_in_google_cloud(name):
    """v4 and v5p count cores, two per chip; v5e and v6e count chips."""
    sides, chips = SLICES[name]
    assert libtpu_name(name) == sides
    if importlib.util.find_spec("libtpu") is not None:
        assert len(slice_devices(sides)) == chips


def test_other_names_stay():
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
