"""The environment command says what a bug report needs, also where JAX does not start, and no secret."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dapo_jax.tools import env

ROOT = Path(__file__).parents[1]


@pytest.fixture
def printed(tmp_path):
    """What the command prints if `import jax` runs some code."""

    def run(jax: str, **variables: str) -> str:
        (tmp_path / "jax.py").write_text(jax)
        environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", **variables}
        command = [sys.executable, "-c", "from dapo_jax import cli; cli.main()", "env"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    return run


def test_the_report_names_versions_devices_and_variables(capsys, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    env.main([])
    printed = capsys.readouterr().out
    for row in ("dapo_jax", "Python", "platform", "host", "jax", "jaxlib", "flax", "numpy"):
        assert re.search(rf"^\| {row} \| .*\d.* \|$", printed, re.MULTILINE), row
    assert "| JAX devices | 8 x cpu |" in printed and "- `JAX_PLATFORMS=cpu`" in printed
    assert "No known conflict of versions." in printed


def test_jax_that_does_not_import_is_part_of_a_report_without_secrets(printed):
    hidden = dict.fromkeys(("HF_TOKEN", "JAX_API_KEY", "TPU_SECRET", "WANDB_API_KEY"), "s3cret")
    variables = {"XLA_FLAGS": "--xla|b", "HOME": "/home/me", "JAX_X": "/home/me/a"}
    error = "jaxlib version 0.5.1 is newer than and incompatible with jax"
    text = printed(f"raise RuntimeError('{error}')", **hidden, **variables)
    assert "| JAX devices | JAX does not start: RuntimeError: jaxlib version 0.5.1 is newer" in text
    assert re.search(r"^\| jaxlib \| \d", text, re.MULTILINE)
    assert "s3cret" not in text and "- `XLA_FLAGS=--xla|b`" in text and "- `JAX_X=~/a`" in text


def test_jax_that_crashes_is_part_of_the_report(printed):
    assert "JAX ended with SIGSEGV" in printed("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")


def test_a_tpu_in_use_is_explained(monkeypatch):
    error = "ABORTED: The TPU is already in use by process with pid 1."
    monkeypatch.delitem(sys.modules, "jax")
    failed = subprocess.CompletedProcess([], 1, "", f"Traceback\nRuntimeError: {error}\n")
    monkeypatch.setattr(env.subprocess, "run", lambda *_, **__: failed)
    assert "process 1 holds the TPU, and only one can: end it" in env.devices()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "no"),
        ({"JPY_PARENT_PID": "4"}, "Jupyter"),
        ({"JPY_PARENT_PID": "4", "COLAB_RELEASE_TAG": "r"}, "Colab"),
        ({"JPY_PARENT_PID": "4", "KAGGLE_KERNEL_RUN_TYPE": "Interactive"}, "Kaggle"),
    ],
)
def test_notebooks_are_recognised(environment, expected):
    assert env.notebook(environment) == expected
