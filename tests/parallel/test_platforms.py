"""If JAX does not find a device, the message names what is missing and the command that installs it."""

import importlib.util
import os
import re

import jax
import pytest

from dapo_jax.parallel import platforms
from dapo_jax.parallel.platforms import missing_for, nvidia_driver, start_failure, unused_gpu


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """Puts an nvidia-smi on the path that lists two GPUs with this driver version; "" = no nvidia-smi."""

    def install(version: str) -> None:
        monkeypatch.setattr(platforms, "_DRIVER_FILE", tmp_path / "version")
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        program = tmp_path / "nvidia-smi"
        program.write_text("#!/bin/sh\n" + f'echo "NVIDIA L4, {version}"\n' * 2 if version else "#!/bin/sh\nexit 9\n")
        program.chmod(0o755)

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
