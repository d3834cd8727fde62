"""The scripts that show that a run survives: at a size that a test can wait for, and that they see what is wrong."""

import json
import os
import shutil
import subprocess
import sys

import crash_test
import pytest
import soak

from dapo_jax.monitor.tensorboard import EVENTS


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The folder of the two runs of a crash test, and what it printed."""
    folder = tmp_path_factory.mktemp("crash")
    command = [
        sys.executable,
        crash_test.__file__,
        "--kills=3",
        "--seed=1",
        f"--folder={folder}",
        "--config.trainer.total_training_steps=30",
    ]
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder, ended.stdout


@pytest.mark.slow
def test_kills_cannot_be_seen(killed):
    folder, printed = killed
    assert "no difference after 3 kills" in printed
    assert list(crash_test.differences(folder / "undisturbed", folder / "killed")) == []


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["a row twice", "another metric", "a lost event file", "another parameter"])
def test_the_crash_test_sees_differences(killed, tmp_path, damage):
    folder = tmp_path / "runs"
    shutil.copytree(killed[0], folder)
    rows = folder / "killed" / "metrics.jsonl"
    lines = rows.read_text().splitlines()
    if damage == "a row twice":
        rows.write_text("\n".join([*lines, lines[-1]]) + "\n")
    elif damage == "another metric":
        lines[3] = json.dumps(json.loads(lines[3]) | {"actor/grad_norm": 0.123})
        rows.write_text("\n".join(lines) + "\n")
    elif damage == "a lost event file":
        max((folder / "killed").glob(EVENTS)).unlink()
    else:
        newest = max(crash_test.saved_steps(folder / "killed"))
        other = str(newest - 2)
        shutil.rmtree(folder / "killed" / "checkpoints" / str(newest))
        (folder / "killed" / "checkpoints" / other).rename(folder / "killed" / "checkpoints" / str(newest))
    assert list(crash_test.differences(folder / "undisturbed", folder / "killed"))


def test_soak_tells_growth_from_noise():
    calm = {
        "resident MB": 500.0,
        "live arrays": 10,
        "live array bytes": 1e6,
        "open files": 30,
        "threads": 20,
        "processes": 2,
    }
    steps = [{**calm, "resident MB": 500 + step % 3} for step in range(100)]
    assert soak.compare(steps)[1] == []
    for name in calm:
        growing = [{**step, name: step[name] * (1 + number / 100)} for number, step in enumerate(steps)]
        assert soak.compare(growing)[1] == [name]


def test_soak_measures_this_process():
    with subprocess.Popen(["sleep", "60"]) as child:
        during = soak.in_use()
        child.kill()
    after = soak.in_use()
    assert set(after) == {"resident MB", *soak.COUNTS} and after["threads"] >= 1
    assert during["processes"] == after["processes"] + 1
