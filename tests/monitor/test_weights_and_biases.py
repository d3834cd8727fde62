"""With a module in the place of wandb that keeps what it is given."""

import importlib.machinery
import json
import os
import re
import subprocess
import sys
from types import ModuleType

import numpy as np
import pytest

from dapo_jax.errors import InputError
from dapo_jax.monitor.records import RunRecords
from dapo_jax.monitor.tensorboard import EVENTS, histogram
from dapo_jax.monitor.weights_and_biases import check_installed


class FakeRun:
    def __init__(self, **arguments):
        self.arguments, self.rows, self.config, self.finished = arguments, [], {}, 0
        self.id = arguments["id"] or f"id{len(FAKE.runs)}"
        self.pending = {}
        self.config = type("Config", (dict,), {"update": lambda self, new, allow_val_change: dict.update(self, new)})()

    def log(self, values, *, step, commit):
        self.pending |= values
        if commit:
            self.rows.append((step, self.pending))
            self.pending = {}

    def finish(self):
        self.finished += 1


FAKE = ModuleType("wandb")


@pytest.fixture(autouse=True)
def runs(monkeypatch):
    FAKE.__spec__ = importlib.machinery.ModuleSpec("wandb", None, origin="wandb/__init__.py")
    FAKE.runs = []
    FAKE.init = lambda **arguments: FAKE.runs.append(FakeRun(**arguments)) or FAKE.runs[-1]
    FAKE.Histogram = lambda np_histogram: np_histogram
    FAKE.Table = lambda columns, data: (columns, data)
    monkeypatch.setitem(sys.modules, "wandb", FAKE)
    return FAKE.runs


def write(workdir, steps, *, resume_step=None, **names):
    records = RunRecords(workdir, resume_step=resume_step, logger=("wandb",), **names)
    records.describe({"seed": 0, "data.val_files": ()}, [])
    for step in steps:
        records.write_samples(step, [{"kind": "best", "response": f"answer {step}"}, {"response": "b", "score": 1.0}])
        records.write_histograms(step, {"length": histogram(np.arange(5)), "none": {}})
        records.write(step, {"loss": float(step), "broken": float("nan")})
    records.close()


def test_a_run_shows_what_tensorboard_shows(tmp_path, runs):
    write(tmp_path / "ten", [0, 1], project_name="math")
    [run] = runs
    assert run.arguments == {"project": "math", "name": "ten", "id": None, "resume": None, "dir": str(tmp_path / "ten")}
    assert run.config == {"seed": 0, "data.val_files": ()} and run.finished == 1
    (step, first), _ = run.rows
    assert step == 0 and first["loss"] == 0.0 and "broken" not in first and "none" not in first
    assert first["samples"] == (["kind", "response", "score"], [["best", "answer 0", None], [None, "b", 1.0]])
    counts, edges = first["length"]
    assert counts.sum() == 5 and (edges[0], edges[-1], len(edges)) == (0, 4, 31)
    assert not list((tmp_path / "ten").glob(EVENTS))


def test_a_resumed_run_keeps_its_id_and_logs_no_step_twice(tmp_path, runs):
    write(tmp_path, [0, 1, 2, 3], experiment_name="a")
    write(tmp_path, [2, 3, 4], resume_step=1, experiment_name="a")
    first, second = runs
    assert second.arguments["id"] == first.id and second.arguments["resume"] == "allow"
    assert [[step for step, _ in run.rows] for run in runs] == [[0, 1, 2, 3], [4]]
    assert "samples" in second.rows[0][1] and "loss" in second.rows[0][1]
    assert json.loads((tmp_path / "wandb.json").read_text()) == {"id": first.id, "last_step": 4}


def test_a_run_that_begins_again_is_another(tmp_path, runs):
    write(tmp_path, [0, 1])
    write(tmp_path, [0, 1])
    assert runs[0].id != runs[1].id and [len(run.rows) for run in runs] == [2, 2]


def test_a_run_that_cannot_begin_is_wrong_input(tmp_path, monkeypatch):
    def refuse(**arguments):
        raise LookupError("api_key not configured")

    monkeypatch.setattr(FAKE, "init", refuse)
    with pytest.raises(InputError, match=r"LookupError: api_key not configured\): run `wandb login`, set WANDB_MODE"):
        write(tmp_path, [0])


def test_a_failure_to_send_is_warned_of_once_and_ends_no_run(tmp_path, monkeypatch, caplog):
    def fail(*arguments, **named):
        raise LookupError("no route to host")

    for name in ("log", "finish"):
        monkeypatch.setattr(FakeRun, name, fail)
    monkeypatch.setattr(FAKE, "Table", fail)
    write(tmp_path, [0, 1, 2])
    [record] = caplog.records
    assert "Weights & Biases fails (LookupError: no route to host)" in record.getMessage()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize("found", [None, importlib.machinery.ModuleSpec("wandb", None)], ids=["nothing", "a folder"])
def test_without_the_package_the_cure_is_named(found, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found)
    with pytest.raises(ValueError, match=r"trainer.logger has 'wandb', .* pip install 'dapo_jax\[wandb\]'"):
        check_installed()


def test_the_package_itself_keeps_a_run_offline(tmp_path):
    """In a process of its own, because this one has the stand-in. A resumed run has the same id."""
    code = (
        "import sys, numpy as np\n"
        "from dapo_jax.monitor.records import RunRecords\n"
        "from dapo_jax.monitor.tensorboard import histogram\n"
        "for steps, resumed in (((0, 1, 2), None), ((2, 3), 1)):\n"
        "    with RunRecords(sys.argv[1], resume_step=resumed, logger=('wandb',)) as records:\n"
        "        records.describe({'seed': 0, 'data.val_files': ()}, [])\n"
        "        for step in steps:\n"
        "            records.write_samples(step, [{'kind': 'best', 'response': 'a', 'score': 1.0}])\n"
        "            records.write_histograms(step, {'length': histogram(np.arange(5)), 'none': {}})\n"
        "            records.write(step, {'loss': float(step)})\n"
    )
    if subprocess.run([sys.executable, "-c", "import wandb.sdk"], capture_output=True).returncode:
        pytest.skip("the package wandb is not installed")
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.returncode == 0 and "fails" not in done.stderr, done.stderr
    known = json.loads((tmp_path / "wandb.json").read_text())
    runs = sorted(path.name for path in (tmp_path / "wandb").glob("offline-run-*"))
    assert known["last_step"] == 3 and len(runs) == 2
    name = rf"offline-run-\d+_\d+-{known['id']}(-\d)?"  # numbered when two begin within a second
    assert all(re.fullmatch(name, run) for run in runs)
