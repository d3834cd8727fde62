"""Trackers: Weights & Biases and the one of docs/metrics.md, with modules in the place of wandb and mlflow."""

import importlib.metadata
import inspect
import json
import os
import re
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from config_problems import assert_one, problems

from dapo_jax.errors import InputError
from dapo_jax.monitor.records import RunRecords
from dapo_jax.monitor.tensorboard import EVENTS, histogram
from dapo_jax.monitor.weights_and_biases import check_installed

GUIDE = Path(__file__).parents[2] / "docs" / "metrics.md"


def stand_in(monkeypatch, name, **functions):
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None, origin=f"{name}/__init__.py")
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture(autouse=True)
def calls(tmp_path, monkeypatch):
    """What the example of the guide asks of mlflow."""
    found, run = [], SimpleNamespace(info=SimpleNamespace(run_id="id7"))

    def function(name):
        return lambda *arguments, **named: found.append((name, *arguments, named)) or run

    names = ("set_experiment", "set_tags", "log_dict", "log_metrics", "end_run", "start_run")
    stand_in(monkeypatch, "mlflow", **{name: function(name) for name in names})
    [example] = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.M | re.S)
    (tmp_path / "tracker.py").write_text(example)
    return found


class FakeRun:
    def __init__(self, identifier, arguments):
        self.id, self.arguments, self.rows, self.config, self.finished = identifier, arguments, [], self, 0
        self.pending, self.options = {}, {}

    def update(self, options, *, allow_val_change):
        self.options |= options

    def log(self, values, *, step, commit):
        self.pending |= values
        if commit:
            self.rows.append((step, self.pending))
            self.pending = {}

    def finish(self):
        self.finished += 1


@pytest.fixture(autouse=True)
def runs(monkeypatch):
    """The runs of Weights & Biases."""
    found = []

    def init(**arguments):
        found.append(FakeRun(arguments["id"] or f"id{len(found)}", arguments))
        return found[-1]

    stand_in(
        monkeypatch,
        "wandb",
        init=init,
        Histogram=lambda np_histogram: np_histogram,
        Table=lambda columns, data: (columns, data),
    )
    return found


def own(tmp_path, name="tracker.py:MLflow"):
    return {"logger": (f"{tmp_path}/{name}",), "project_name": "math"}


def write(workdir, steps, *, resume_step=None, logger=("wandb",), **names):
    with RunRecords(workdir, resume_step=resume_step, logger=logger, **names) as records:
        records.describe({"seed": 0, "data.val_files": ()}, ["loss"])
        for step in steps:
            texts = [{"kind": "best", "response": f"answer {step}"}, {"response": "b", "score": 1.0}]
            records.write_samples(step, texts)
            records.write_histograms(step, {"length": histogram(np.arange(5)), "none": {}})
            records.write(step, {"acc/mean@4": float(step), "broken": float("nan")})


def test_the_example_sends_what_a_run_records_and_resumes_its_run(calls, tmp_path):
    write(tmp_path / "ten", [0], **own(tmp_path))
    texts = [{"kind": "best", "response": "answer 0"}, {"response": "b", "score": 1.0}]
    assert calls == [
        ("set_experiment", "math", {}),
        ("start_run", {"run_id": None, "run_name": "ten"}),
        ("set_tags", {"seed": "0", "data.val_files": "()"}, {}),
        ("log_dict", texts, "samples/step_0.json", {}),
        ("log_metrics", {"acc/mean_at_4": 0.0}, {"step": 0}),
        ("end_run", {}),
    ]
    calls.clear()
    write(tmp_path / "ten", [1], resume_step=0, **own(tmp_path))
    assert calls[1] == ("start_run", {"run_id": "id7", "run_name": "ten"})


def test_weights_and_biases_shows_what_tensorboard_shows(tmp_path, runs):
    write(tmp_path / "ten", [0, 1], project_name="math")
    [run] = runs
    assert run.arguments == {"project": "math", "name": "ten", "id": None, "resume": None, "dir": str(tmp_path / "ten")}
    assert run.options == {"seed": 0, "data.val_files": ()} and run.finished == 1
    (step, first), _ = run.rows
    assert step == 0 and first["acc/mean@4"] == 0.0 and "broken" not in first and "none" not in first
    assert first["samples"] == (["kind", "response", "score"], [["best", "answer 0", None], [None, "b", 1.0]])
    counts, edges = first["length"]
    assert counts.sum() == 5 and (edges[0], edges[-1], len(edges)) == (0, 4, 31)
    assert not list((tmp_path / "ten").glob(EVENTS))


def test_a_resumed_run_keeps_its_id_logs_no_step_twice_and_one_that_begins_again_is_another(tmp_path, runs):
    write(tmp_path, [0, 1, 2, 3], experiment_name="a")
    write(tmp_path, [2, 3, 4], resume_step=1, experiment_name="a")
    first, second = runs
    assert second.arguments["id"] == first.id and second.arguments["resume"] == "allow"
    assert [[step for step, _ in run.rows] for run in runs] == [[0, 1, 2, 3], [4]]
    assert {"samples", "acc/mean@4"} <= second.rows[0][1].keys()
    assert json.loads((tmp_path / "wandb.json").read_text()) == {"id": first.id, "last_step": 4}
    write(tmp_path, [0, 1])
    assert runs[2].id != first.id and len(runs[2].rows) == 2


@pytest.mark.parametrize("tracker", ["tracker.py:MLflow", "Weights & Biases"])
def test_a_failure_is_warned_of_once_and_ends_no_run(tracker, tmp_path, monkeypatch, caplog):
    def fail(*arguments, **named):
        raise LookupError("no route to host")

    for module in ("mlflow", "wandb"):
        for name in ("log_dict", "log_metrics", "end_run", "Table"):
            monkeypatch.setattr(sys.modules[module], name, fail, raising=False)
    for name in ("log", "finish"):
        monkeypatch.setattr(FakeRun, name, fail)
    write(tmp_path / "ten", [0, 1, 2], **({} if "Weights" in tracker else own(tmp_path)))
    [record] = caplog.records
    assert re.search(rf"{tracker} fails .LookupError: no route to host.*metrics.jsonl is complete", record.getMessage())
    assert len((tmp_path / "ten" / "metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent.py:MLflow", "loading it fails with FileNotFoundError"),
        ("tracker.py:Mlflow", "has no class 'Mlflow': correct the name"),
        ("tracker.py:mlflow", "has no class 'mlflow': correct the name"),
        ("starts_not.py:Tracker", "which does not start .TypeError: .*leave it out"),
    ],
)
def test_one_that_does_not_start_is_wrong_input(name, message, tmp_path):
    (tmp_path / "starts_not.py").write_text("class Tracker: pass")
    with pytest.raises(InputError, match=f"trainer.logger has .*{message}"):
        write(tmp_path, [0], **own(tmp_path, name))


def test_a_run_of_weights_and_biases_that_cannot_begin_is_wrong_input(tmp_path, monkeypatch):
    def refuse(**arguments):
        raise LookupError("api_key not configured")

    monkeypatch.setattr(sys.modules["wandb"], "init", refuse)
    with pytest.raises(InputError, match=r"LookupError: api_key not configured\): run `wandb login`, set WANDB_MODE"):
        write(tmp_path, [0])


@pytest.mark.parametrize("found", [None, ModuleSpec("wandb", None)], ids=["nothing", "a folder"])
def test_without_the_package_the_cure_is_named(found, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found)
    with pytest.raises(ValueError, match=r"trainer.logger has 'wandb', .* pip install 'dapo_jax\[wandb\]'"):
        check_installed()


def test_the_logger_takes_paths_of_classes():
    assert problems({"trainer.logger": ("console", "FILE.py:MLflow"), "trainer.project_name": "math"}) == []
    assert_one(problems({"trainer.logger": ("console", "mlflow")}), "must be some of console, .* or FILE.py:Class")


# In a process of its own, because this one has the stand-in.
OFFLINE = f"""
import sys
import numpy as np
from dapo_jax.monitor.records import RunRecords
from dapo_jax.monitor.tensorboard import histogram
{inspect.getsource(write)}
write(sys.argv[1], (0, 1, 2))
write(sys.argv[1], (2, 3), resume_step=1)
"""


@pytest.mark.slow
@pytest.mark.skipif(not [*importlib.metadata.distributions(name="wandb")], reason="needs the package wandb")
def test_the_package_wandb_keeps_a_run_offline_and_a_resumed_one_has_the_same_id(tmp_path):
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE, str(tmp_path)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0 and "fails" not in done.stderr, done.stderr
    known = json.loads((tmp_path / "wandb.json").read_text())
    runs = sorted(path.name for path in (tmp_path / "wandb").glob("offline-run-*"))
    assert known["last_step"] == 3 and len(runs) == 2
    name = rf"offline-run-\d+_\d+-{known['id']}(-\d)?"  # numbered when two begin within a second
    assert all(re.fullmatch(name, run) for run in runs)
