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
from types import SimpleNamespace
from unittest.mock import MagicMock, call

import numpy as np
import pytest
from config_problems import assert_one, problems

from dapo_jax.config.sections import TrainerConfig
from dapo_jax.errors import InputError
from dapo_jax.monitor.records import RunRecords
from dapo_jax.monitor.tensorboard import EVENTS, histogram
from dapo_jax.monitor.weights_and_biases import check_installed

GUIDE = Path(__file__).parents[2] / "docs" / "metrics.md"


@pytest.fixture(autouse=True)
def mlflow(tmp_path, monkeypatch):
    """What the example of the guide, in tracker.py, takes for mlflow."""
    module = MagicMock()
    module.start_run.return_value.info.run_id = "id7"
    monkeypatch.setitem(sys.modules, "mlflow", module)
    [example] = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.M | re.S)
    (tmp_path / "tracker.py").write_text(example)
    return module


@pytest.fixture(autouse=True)
def wandb(monkeypatch):
    module = MagicMock(__spec__=ModuleSpec("wandb", None, origin="wandb/__init__.py"), runs=[])
    module.Histogram = lambda np_histogram: np_histogram
    module.Table = lambda columns, data: (columns, data)

    def init(**arguments):
        module.runs.append(MagicMock(id=arguments["id"] or f"id{len(module.runs)}", arguments=arguments))
        return module.runs[-1]

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def rows(run):
    """(step, values) of what a run of Weights & Biases has committed."""
    found, pending = [], {}
    for logged in run.log.call_args_list:
        pending |= logged.args[0]
        if logged.kwargs["commit"]:
            found.append((logged.kwargs["step"], pending))
            pending = {}
    return found


def own(tmp_path, name="tracker.py:MLflow"):
    return {"logger": (f"{tmp_path}/{name}",), "project_name": "math"}


def write(workdir, steps, *, resume_step=None, logger=("wandb",), **names):
    with RunRecords(workdir, TrainerConfig(logger=logger, **names), resume_step=resume_step) as records:
        records.describe({"seed": 0, "data.val_files": ()}, ["loss"])
        for step in steps:
            texts = [{"kind": "best", "response": f"answer {step}"}, {"response": "b", "score": 1.0}]
            records.write_samples(step, texts)
            records.write_histograms(step, {"length": histogram(np.arange(5)), "none": {}})
            records.write(step, {"acc/mean@4": float(step), "broken": float("nan")})


def test_the_example_sends_what_a_run_records_and_resumes_its_run(mlflow, tmp_path):
    write(tmp_path / "ten", [0], **own(tmp_path))
    texts = [{"kind": "best", "response": "answer 0"}, {"response": "b", "score": 1.0}]
    assert mlflow.mock_calls == [
        call.set_experiment("math"),
        call.start_run(run_id=None, run_name="ten"),
        call.set_tags({"seed": "0", "data.val_files": "()"}),
        call.log_dict(texts, "samples/step_0.json"),
        call.log_metrics({"acc/mean_at_4": 0.0}, step=0),
        call.end_run(),
    ]
    write(tmp_path / "ten", [1], resume_step=0, **own(tmp_path))
    assert mlflow.start_run.call_args == call(run_id="id7", run_name="ten")


def test_weights_and_biases_shows_what_tensorboard_shows(tmp_path, wandb):
    write(tmp_path / "ten", [0, 1], project_name="math")
    [run] = wandb.runs
    assert run.arguments == {"project": "math", "name": "ten", "id": None, "resume": None, "dir": str(tmp_path / "ten")}
    run.config.update.assert_called_once_with({"seed": 0, "data.val_files": ()}, allow_val_change=True)
    run.finish.assert_called_once()
    (step, first), _ = rows(run)
    assert step == 0 and first["acc/mean@4"] == 0.0 and "broken" not in first and "none" not in first
    assert first["samples"] == (["kind", "response", "score"], [["best", "answer 0", None], [None, "b", 1.0]])
    counts, edges = first["length"]
    assert counts.sum() == 5 and (edges[0], edges[-1], len(edges)) == (0, 4, 31)
    assert not list((tmp_path / "ten").glob(EVENTS))


def test_a_resumed_run_keeps_its_id_logs_no_step_twice_and_one_that_begins_again_is_another(tmp_path, wandb):
    write(tmp_path, [0, 1, 2, 3], experiment_name="a")
    write(tmp_path, [2, 3, 4], resume_step=1, experiment_name="a")
    first, second = wandb.runs
    assert second.arguments["id"] == first.id and second.arguments["resume"] == "allow"
    assert [[step for step, _ in rows(run)] for run in wandb.runs] == [[0, 1, 2, 3], [4]]
    assert {"samples", "acc/mean@4"} <= rows(second)[0][1].keys()
    assert json.loads((tmp_path / "wandb.json").read_text()) == {"id": first.id, "last_step": 4}
    write(tmp_path, [0, 1])
    assert wandb.runs[2].id != first.id and len(rows(wandb.runs[2])) == 2


@pytest.mark.parametrize("tracker", ["tracker.py:MLflow", "Weights & Biases"])
def test_a_failure_is_warned_of_once_and_ends_no_run(tracker, tmp_path, mlflow, wandb, caplog):
    def fail(*arguments, **named):
        raise LookupError("no route to host")

    mlflow.log_dict = mlflow.log_metrics = mlflow.end_run = wandb.Table = fail
    wandb.init = lambda **arguments: SimpleNamespace(id="id0", config=MagicMock(), log=fail, finish=fail)
    write(tmp_path / "ten", [0, 1, 2], **({} if "Weights" in tracker else own(tmp_path)))
    [record] = caplog.records
    assert re.search(rf"{tracker} fails .LookupError: no route to host.*metrics.jsonl is complete", record.getMessage())
    assert len((tmp_path / "ten" / "metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent.py:MLflow", "the file .*absent.py does not exist: correct the path"),
        ("tracker.py:Mlflow", "has no class 'Mlflow' .*correct the path"),
        ("tracker.py:LABEL", "is no class: name a class"),
        ("starts_not.py:Tracker", "which does not start .TypeError: .*leave it out"),
    ],
)
def test_one_that_does_not_start_is_wrong_input(name, message, tmp_path):
    (tmp_path / "starts_not.py").write_text("class Tracker: pass")
    with (tmp_path / "tracker.py").open("a") as file:
        file.write("def LABEL(): ...")
    with pytest.raises(InputError, match=f"trainer.logger.*{message}"):
        write(tmp_path, [0], **own(tmp_path, name))


def test_a_run_of_weights_and_biases_that_cannot_begin_is_wrong_input(tmp_path, wandb):
    wandb.init = MagicMock(side_effect=LookupError("api_key not configured"))
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
from dapo_jax.config.sections import TrainerConfig
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
