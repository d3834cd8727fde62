"""Packages that do not fit each other are named with a cure, from fabricated installations."""

import os
import re

import pytest

from dapo_jax.parallel.conflicts import conflicts, conflicts_here, explained

NEEDS = {
    "dapo_jax": ["jax<0.13,>=0.10.2", "numpy>=2.0", "gguf>=0.17; extra == 'quickstart'"],
    "jax": [
        "jaxlib<=0.10.2,>=0.10.1",
        "jaxlib==0.10.1; extra == 'minimum-jaxlib'",
        "numpy<2; python_version < '3'",
        "libtpu==0.0.42.*; extra == 'tpu'",
        "jax-cuda13-plugin[with-cuda]<=0.10.2,>=0.10.2; extra == 'cuda13'",
    ],
    "jax-cuda13-plugin": ["jax-cuda13-pjrt==0.10.2", "nvidia-cudnn-cu13<10.0,>=9.12; extra == 'with-cuda'"],
}
FITTING = {"dapo_jax": "0.1.0", "jax": "0.10.2", "jaxlib": "0.10.2", "numpy": "2.4.6", "gguf": "0.1"}
ON_GPU = {"jax_cuda13_plugin": "0.10.2", "jax-cuda13-pjrt": "0.10.2", "nvidia-cudnn-cu13": "9.28.1.4"}


def found(changed=None, loaded=None, environment=None):
    installed = FITTING | (changed or {})
    needs = {
        owner: lines for owner, lines in NEEDS.items() if owner in installed or owner.replace("-", "_") in installed
    }
    return conflicts(installed, needs, loaded or {}, environment or {})


def test_what_fits_is_no_conflict():
    own = "/env/lib/python3.12/site-packages/libtpu/libtpu.so"
    assert found() == found(ON_GPU) == found({"libtpu": "0.0.42.1"}, environment={"TPU_LIBRARY_PATH": own}) == []
    assert found(loaded={"jax": "0.10.2", "numpy": "2.4.6", "libtpu": ""}) == []
    assert conflicts_here(os.environ) == [], "of the environment that runs the tests"


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"jax": "0.7.2"}, r"dapo_jax 0.1.0 needs jax<0.13,>=0.10.2, but 0.7.2 is installed: pip install 'jax<"),
        ({"jaxlib": "0.11.0"}, r"0.10.2 needs jaxlib<=0.10.2,>=0.10.1, but 0.11.0 is installed: pip install 'jaxlib"),
        ({"libtpu": "0.0.21"}, r"jax 0.10.2 needs libtpu==0.0.42.\*, but 0.0.21 is installed: pip install '?libtpu"),
        ({"libtpu": "0.0.21", "torch-xla": "2.8"}, r"0.0.21 is installed \(torch_xla wanted another one, and will not"),
        ({"libtpu": "0.0.21", "tensorflow_tpu": "2.18"}, r"\(tensorflow-tpu wanted another one"),
        ({"jax-cuda13-plugin": "0.9.2"}, r"jax 0.10.2 needs jax-cuda13-plugin<=0.10.2,>=0.10.2, but 0.9.2 is"),
        (ON_GPU | {"nvidia-cudnn-cu13": "9.0.0"}, r"jax-cuda13-plugin 0.10.2 needs nvidia-cudnn-cu13<10.0,>=9.12, but"),
        (ON_GPU | {"jax-cuda12-plugin": "0.10.2"}, r"jax-cuda12-plugin and jax-cuda13-plugin are both inst.*uninst"),
        ({"libtpu": "0.0.42.1", "libtpu_nightly": "0.1"}, r"libtpu and libtpu-nightly are both .* 'dapo_jax.tpu.'"),
    ],
)
def test_packages_that_do_not_fit_are_named_with_a_cure(changed, expected):
    [conflict] = found(changed)
    assert re.search(expected, conflict), conflict


@pytest.mark.parametrize(
    ("loaded", "expected"),
    [
        ({"jax": "0.7.2"}, "loaded jax 0.7.2, but 0.10.2 is installed now: restart the kernel"),
        ({"numpy": "1.26.4"}, "loaded numpy 1.26.4, but 2.4.6 is installed now: restart the kernel"),
        ({"torch_xla": "2.8.0"}, "loaded torch_xla, .*: restart the kernel"),
    ],
)
def test_an_upgrade_under_a_running_kernel_is_noticed(loaded, expected):
    [conflict] = found(loaded=loaded)
    assert re.search(expected, conflict), conflict


def test_a_libtpu_of_the_system_is_noticed():
    [conflict] = found(environment={"TPU_LIBRARY_PATH": "/lib/libtpu.so"})
    assert "TPU_LIBRARY_PATH=/lib/libtpu.so" in conflict and "unset it" in conflict


TPU = "Unable to initialize backend 'tpu': "
HELD = "ABORTED: The TPU is already in use by "
OLDER = "INVALID_ARGUMENT: Mismatched PJRT plugin PJRT API version (0.54) and framework PJRT API version 0.51)."
NEWER = "Unexpected PJRT_Plugin_Attributes_Args size: expected 32, got 24. The plugin is likely built with a later"
LOCKED = "ABORTED: Internal error when accessing libtpu multi-process lockfile. The potential"


@pytest.mark.parametrize(
    ("message", "installed", "expected"),
    [
        (f"{HELD}process with pid 31. Not attempting to load", (), "process 31 holds the"),
        (f"{HELD}process with pid 7. Not attempting", (), "started this one.*restart it"),
        (f"{HELD}another process probably owned by another user.", (), "libtpu_lockfile"),
        (LOCKED, (), "libtpu_lockfile"),
        (OLDER, ("jax_cuda12_plugin",), "different releases: pip install --upgrade 'dapo_jax.cuda12.'"),
        (NEWER, ("libtpu",), "different releases: pip install --upgrade 'dapo_jax.tpu.'"),
        ("module 'libtpu' has no attribute 'get_library_path'", (), "different releases"),
    ],
)
def test_messages_of_jax_are_explained(message, installed, expected):
    explanation = explained(TPU + message, parent=7, installed=installed)
    assert explanation and re.search(expected, explanation), explanation


def test_other_messages_are_left_alone():
    for message in ("UNAVAILABLE: No TPU found", "", "use by process with pid 3"):
        assert explained(message, parent=7) is None
