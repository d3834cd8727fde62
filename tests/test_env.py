"""The environment command says what a bug report needs, also where JAX does not start, and no secret."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dapo_jax import env

ROOT = Path(__file__).parents[1]


def run(tmp_path: Path, jax: str, **variables: str) -> str:
    """What the command prints if `import jax` runs this code."""
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax/__init__.py").write_text(jax)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", "dapo_jax.env"],
        env={**os.environ, "PYTHONPATH": path, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_the_report_names_versions_devices_and_variables(capsys, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    env.main([])
    printed = capsys.readouterr().out
    for row in ("dapo_jax", "Python", "platform", "host", "jax", "jaxlib", "flax", "numpy"):
        assert re.search(rf"^\| {row} \| .*\d.* \|$", printed, re.MULTILINE), row
    assert "| JAX devices | 8 x cpu |" in printed and "- `JAX_PLATFORMS=cpu`" in printed
    assert "No known conflict of versions." in printed


def test_jax_that_does_not_import_is_part_of_the_report(tmp_path):
    printed = run(tmp_path, "raise RuntimeError('jaxlib version 0.5.1 is newer than and incompatible with jax')")
    assert "| JAX devices | JAX does not start: RuntimeError: jaxlib version 0.5.1 is newer" in printed
    assert re.search(r"^\| jaxlib \| \d", printed, re.MULTILINE)


def test_jax_that_crashes_is_part_of_the_report(tmp_path):
    assert "JAX ended with SIGSEGV" in run(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")


def test_a_tpu_in_use_is_explained(tmp_path):
    printed = run(tmp_path, "raise RuntimeError('ABORTED: The TPU is already in use by process with pid 1.')")
    assert "process 1 holds the TPU, and only one can: end it" in printed


def test_secrets_are_not_printed(tmp_path):
    hidden = {"HF_TOKEN": "s3cret", "JAX_API_KEY": "s3cret", "TPU_SECRET": "s3cret", "WANDB_API_KEY": "s3cret"}
    printed = run(
        tmp_path, "device_count = lambda: 1/0", **hidden, XLA_FLAGS="--xla|b", HOME="/home/me", JAX_X="/home/me/a"
    )
    assert "s3cret" not in printed and "- `XLA_FLAGS=--xla|b`" in printed and "- `JAX_X=~/a`" in printed


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
