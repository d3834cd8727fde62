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


def repeat_a_row(rows, folder):
    return [*rows, rows[-1]]


def change_a_metric(rows, folder):
    return [*rows[:3], json.dumps(json.loads(rows[3]) | {"actor/grad_norm": 0.123}), *rows[4:]]


def lose_an_event_file(rows, folder):
    max(folder.glob(EVENTS)).unlink()
    return rows


def exchange_parameters(rows, folder):
    newest = max(crash_test.saved_steps(folder))
    shutil.rmtree(folder / "checkpoints" / str(newest))
    (folder / "checkpoints" / str(newest - 2)).rename(folder / "checkpoints" / str(newest))
    return rows


@pytest.mark.slow
def test_kills_cannot_be_seen(tmp_path):
    whole, killed = tmp_path / "undisturbed", tmp_path / "killed"
    options = ["--kills=3", "--seed=1", f"--folder={tmp_path}", "--config.trainer.total_training_steps=30"]
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "1"}
    command = [sys.executable, crash_test.__file__, *options]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "no difference after 3 kills" in ended.stdout
    assert list(crash_test.differences(whole, killed)) == []
    for damage in (repeat_a_row, change_a_metric, lose_an_event_file, exchange_parameters):
        folder = shutil.copytree(killed, tmp_path / damage.__name__)
        rows = damage((folder / "metrics.jsonl").read_text().splitlines(), folder)
        (folder / "metrics.jsonl").write_text("\n".join(rows) + "\n")
        assert list(crash_test.differences(whole, folder)), damage


def test_soak_tells_growth_from_noise():
    counts = {"live arrays": 10, "live array bytes": 1e6, "open files": 30, "threads": 20, "processes": 2}
    steps = [{"resident MB": 500.0 + step % 3, **counts} for step in range(100)]
    assert soak.compare(steps)[1] == []
    for name in ("resident MB", *counts):
        growing = [{**step, name: step[name] * (1 + number / 100)} for number, step in enumerate(steps)]
        assert soak.compare(growing)[1] == [name]


def test_soak_measures_this_process():
    with subprocess.Popen(["sleep", "60"]) as child:
        during = soak.in_use()
        child.kill()
    after = soak.in_use()
    assert set(after) == {"resident MB", *soak.COUNTS} and after["threads"] >= 1
    assert during["processes"] == after["processes"] + 1
