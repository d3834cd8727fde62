"""Devices that JAX does not find, leaves unused or cannot use with these packages are named with a cure."""

import importlib.util
import os
import re

import jax
import pytest
from small_run import small_config

from dapo_jax.parallel import platforms
from dapo_jax.parallel.conflicts import conflicts, conflicts_here, explained
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.parallel.platforms import (
    gpus_of_host,
    idle_gpus,
    missing_for,
    nvidia_driver,
    start_failure,
    unused_gpu,
)
from dapo_jax.run import parts


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """Puts an nvidia-smi on the path that lists two GPUs with this driver version; "" = no nvidia-smi."""

    def install(version: str) -> str:
        monkeypatch.setattr(platforms, "_DRIVER_FILE", tmp_path / "version")
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        program, listed = tmp_path / "nvidia-smi", f"NVIDIA L4, {version}\nNVIDIA L4, {version}"
        gpus = "GPU 0: NVIDIA L4 (UUID: GPU-1)\n  MIG 1g.10gb Device 0: (UUID: MIG-1)\nGPU 1: NVIDIA L4 (UUID: GPU-2)"
        script = f'[ "$1" = --list-gpus ] && echo "{gpus}" || echo "{listed}"' if version else "exit 9"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        return str(tmp_path)

    return install


@pytest.fixture
def plugins(monkeypatch):
    """Makes exactly these plugins appear installed."""

    def install(*names: str) -> None:
        found, known = importlib.util.find_spec, (*platforms.PLUGINS, "libtpu")

        def find_spec(name):
            return (object() if name in names else None) if name in known else found(name)

        monkeypatch.setattr(platforms.importlib.util, "find_spec", find_spec)

    return install


@pytest.mark.parametrize(
    ("version", "installed", "message"),
    [
        ("", (), "no NVIDIA driver here .* no CUDA plugin .* pip install 'dapo_jax.cuda13.'"),
        ("", ("jax_cuda13_plugin",), "jax_cuda13_plugin is installed.*: install the driver, or .*--gpus all"),
        ("580.65.06", (), "driver 580.65.06 is here with 2 x NVIDIA L4, and no CUDA plugin .*'dapo_jax.cuda13.'"),
        ("550.54", (), "driver 550.54 is here .* pip install 'dapo_jax.cuda12.'"),
        ("550.54", ("jax_cuda13_plugin",), "jax_cuda13_plugin needs driver 580 or newer: .*'dapo_jax.cuda12.'"),
        ("580.65.06", ("jax_cuda13_plugin",), "finds no usable GPU"),
    ],
)
def test_what_is_missing_for_a_gpu_is_named_with_the_extra_for_its_driver(driver, plugins, version, installed, message):
    driver(version)
    plugins(*installed)
    assert re.search(message, missing_for("gpu"))


def test_what_is_missing_for_other_platforms_is_named(plugins):
    plugins()
    assert "on a TPU machine, pip install 'dapo_jax[tpu]'" in missing_for("tpu")
    plugins("libtpu")
    assert missing_for("tpu").startswith("libtpu finds no free TPU: ")
    assert missing_for("nonsense").endswith("use cpu, cuda or tpu")


def test_the_driver_is_known_without_nvidia_smi(driver, tmp_path):
    driver("")
    assert nvidia_driver() is None
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23\n")
    assert nvidia_driver() == ("", "570.86.15")


def test_a_gpu_that_jax_does_not_use_is_a_warning(driver, plugins, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(platforms, "_asked", lambda: "")
    plugins()
    driver("")
    assert unused_gpu() is None
    driver("550.54")
    warning = unused_gpu()
    assert warning and warning.startswith("JAX computes on the CPU: the NVIDIA driver 550.54 is here")
    assert "dapo_jax[cuda12]" in warning and "JAX_PLATFORMS=cpu" in warning
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert unused_gpu() is None
    monkeypatch.undo()
    assert unused_gpu() is None, "JAX_PLATFORMS=cpu was asked for"


@pytest.mark.parametrize("error", [RuntimeError("no group was kept"), AssertionError("x")])
def test_other_errors_are_not_taken_for_it(error):
    with pytest.raises(type(error)) as raised:
        raise error
    assert start_failure(raised.value) is None


def test_a_failed_start_names_who_holds_the_tpu_and_what_does_not_fit(monkeypatch):
    monkeypatch.setattr(platforms, "conflicts_here", lambda environment: ["jax 1 needs libtpu==2, but 3 is installed"])
    monkeypatch.setattr(platforms, "_devices_without_a_choice", lambda: "8 x cpu")
    held = "ABORTED: The TPU is already in use by process with pid 1. Not attempting to load libtpu.so in this process."
    message = start_failure(RuntimeError(f"Unable to initialize backend 'tpu': {held} (set JAX_PLATFORMS='')"))
    assert message and "process 1 holds the TPU, and only one can" in message and held in message
    assert "; jax 1 needs libtpu==2, but 3 is installed; without JAX_PLATFORMS, JAX finds 8 x cpu" in message


# GPUs that a run leaves idle.


def test_what_names_the_gpus_of_a_host(driver):
    assert gpus_of_host({"PATH": "/nowhere"}, 1) == {}
    assert gpus_of_host({"PATH": f"{driver('580')}:/bin"}, 1) == {"nvidia-smi": 2}
    of_slurm = {"SLURM_GPUS_ON_NODE": "8", "SLURM_GPUS_PER_TASK": "a100:2"}
    assert gpus_of_host({"PATH": "/nowhere", **of_slurm}, 3) == {"SLURM_GPUS_ON_NODE": 8, "SLURM_GPUS_PER_TASK": 6}
    for visible, count in {"0,1,2": 3, "GPU-12-1, GPU-3": 2, "0,-1,1": 1, "": 0, "-1": 0}.items():
        assert gpus_of_host({"PATH": "/nowhere", "CUDA_VISIBLE_DEVICES": visible}, 1)["CUDA_VISIBLE_DEVICES"] == count


def test_gpus_that_no_process_of_the_host_uses_are_named(monkeypatch):
    monkeypatch.setattr(jax, "local_device_count", lambda: 1)
    monkeypatch.setattr(platforms.socket, "gethostname", lambda: "node1")
    eight = {"PATH": "/nowhere", "SLURM_GPUS_ON_NODE": "8", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    warning = idle_gpus(eight)
    assert warning and warning.startswith("JAX uses 1 of the 8 GPUs that SLURM_GPUS_ON_NODE names on node1: ")
    for processes in (1, 7, 8):  # on this host, plus one on another
        monkeypatch.setattr(platforms, "gather", lambda own, processes=processes: [own] * processes + [["node2", 8]])
        assert bool(idle_gpus(eight)) == (processes < 8)
    assert idle_gpus({"PATH": "/nowhere"}) is None


@pytest.mark.parametrize(("platform", "data", "warns"), [("gpu", -1, True), ("gpu", 2, False), ("cpu", -1, False)])
def test_a_run_that_takes_all_devices_warns(monkeypatch, caplog, tmp_path, platform, data, warns):
    monkeypatch.setattr(parts, "platform", lambda mesh: platform)
    monkeypatch.setattr(parts, "idle_gpus", lambda: "JAX uses 1 of the 8 GPUs")
    config = small_config(tmp_path, **{"mesh.data": data, "mesh.fsdp": 1, "mesh.tensor": 1})
    parts.report_devices((), config.mesh, make_mesh(2, 1, 1, jax.devices()[:2]))
    assert [record.levelname for record in caplog.records if "1 of the 8" in record.message] == ["WARNING"] * warns


# Packages that do not fit each other, from fabricated installations.

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
OWN_LIBTPU = "/env/lib/python3.12/site-packages/libtpu/libtpu.so"


def found(changed=None, loaded=None, environment=None):
    installed = FITTING | (changed or {})
    needs = {
        owner: lines for owner, lines in NEEDS.items() if owner in installed or owner.replace("-", "_") in installed
    }
    return conflicts(installed, needs, loaded or {}, environment or {})


def test_what_fits_is_no_conflict():
    assert found() == found(ON_GPU) == found({"libtpu": "0.0.42.1"}, None, {"TPU_LIBRARY_PATH": OWN_LIBTPU}) == []
    assert found(loaded={"jax": "0.10.2", "numpy": "2.4.6", "libtpu": ""}) == []
    assert conflicts_here(os.environ) == [], "of the environment that runs the tests"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([{"jax": "0.7.2"}], r"dapo_jax 0.1.0 needs jax<0.13,>=0.10.2, but 0.7.2 is installed: pip install 'jax<"),
        ([{"jaxlib": "0.11.0"}], r"0.10.2 needs jaxlib<=0.10.2,>=0.10.1, but 0.11.0 is installed: pip install 'jaxlib"),
        ([{"libtpu": "0.0.21"}], r"jax 0.10.2 needs libtpu==0.0.42.\*, but 0.0.21 is installed: pip install '?libtpu"),
        ([{"libtpu": "0.0.21", "torch-xla": "2.8"}], r"0.0.21 is installed \(torch_xla wanted another one, and will"),
        ([{"libtpu": "0.0.21", "tensorflow_tpu": "2.18"}], r"\(tensorflow-tpu wanted another one"),
        ([{"jax-cuda13-plugin": "0.9.2"}], r"jax 0.10.2 needs jax-cuda13-plugin<=0.10.2,>=0.10.2, but 0.9.2 is"),
        (
            [ON_GPU | {"nvidia-cudnn-cu13": "9.0.0"}],
            r"jax-cuda13-plugin 0.10.2 needs nvidia-cudnn-cu13<10.0,>=9.12, but",
        ),
        ([ON_GPU | {"jax-cuda12-plugin": "0.10.2"}], r"jax-cuda12-plugin and jax-cuda13-plugin are both inst.*uninst"),
        ([{"libtpu": "0.0.42.1", "libtpu_nightly": "0.1"}], r"libtpu and libtpu-nightly are both .* 'dapo_jax.tpu.'"),
        ([None, {"jax": "0.7.2"}], "loaded jax 0.7.2, but 0.10.2 is installed now: restart the kernel"),
        ([None, {"numpy": "1.26.4"}], "loaded numpy 1.26.4, but 2.4.6 is installed now: restart the kernel"),
        ([None, {"torch_xla": "2.8.0"}], "loaded torch_xla, .*: restart the kernel"),
        ([None, None, {"TPU_LIBRARY_PATH": "/lib/libtpu.so"}], "TPU_LIBRARY_PATH=/lib/libtpu.so makes .*: unset it"),
    ],
)
def test_what_does_not_fit_is_named_with_a_cure(given, expected):
    """Packages; what a running kernel has loaded; a libtpu of the system."""
    [conflict] = found(*given)
    assert re.search(expected, conflict), conflict


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
        *((other, (), "^$") for other in ("UNAVAILABLE: No TPU found", "", "use by process with pid 3")),
    ],
)
def test_messages_of_jax_are_explained(message, installed, expected):
    explanation = explained(TPU + message, parent=7, installed=installed) or ""
    assert re.search(expected, explanation), explanation
