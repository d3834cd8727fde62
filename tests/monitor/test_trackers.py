"""Trackers of one's own, and the one of docs/metrics.md with a module in the place of mlflow."""

import re
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from config_problems import assert_one, problems

from dapo_jax.errors import InputError
from dapo_jax.monitor.records import RunRecords
from dapo_jax.monitor.tensorboard import histogram

GUIDE = Path(__file__).parents[2] / "docs" / "metrics.md"


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """What the example of the guide asks of mlflow."""
    found, mlflow = [], types.ModuleType("mlflow")
    run = types.SimpleNamespace(info=types.SimpleNamespace(run_id="id7"))
    for name in ("set_experiment", "set_tags", "log_dict", "log_metrics", "end_run", "start_run"):

        def called(*arguments, name=name, **named):
            found.append((name, *arguments, named))
            return run

        setattr(mlflow, name, called)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    [example] = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.M | re.S)
    (tmp_path / "tracker.py").write_text(example)
    return found


def write(tmp_path, steps, *, resume_step=None, name="tracker.py:MLflow"):
    workdir = tmp_path / "ten"
    with RunRecords(
        workdir, resume_step=resume_step, logger=(f"{tmp_path}/{name}",), project_name="math", experiment_name=""
    ) as records:
        records.describe({"seed": 0}, ["loss"])
        for step in steps:
            records.write_samples(step, [{"kind": "best", "response": "34"}])
            records.write_histograms(step, {"length": histogram(np.arange(5))})
            records.write(step, {"acc/mean@4": float(step), "broken": float("nan")})


def test_the_example_sends_what_a_run_records_and_resumes_its_run(calls, tmp_path):
    write(tmp_path, [0])
    assert calls == [
        ("set_experiment", "math", {}),
        ("start_run", {"run_id": None, "run_name": "ten"}),
        ("set_tags", {"seed": "0"}, {}),
        ("log_dict", [{"kind": "best", "response": "34"}], "samples/step_0.json", {}),
        ("log_metrics", {"acc/mean_at_4": 0.0}, {"step": 0}),
        ("end_run", {}),
    ]
    calls.clear()
    write(tmp_path, [1], resume_step=0)
    assert calls[1] == ("start_run", {"run_id": "id7", "run_name": "ten"})


def test_a_failure_is_warned_of_once_and_ends_no_run(calls, tmp_path, monkeypatch, caplog):
    for name in ("log_dict", "log_metrics", "end_run"):
        monkeypatch.setattr(sys.modules["mlflow"], name, lambda *arguments, **named: 1 / 0)
    write(tmp_path, [0, 1, 2])
    [record] = caplog.records
    assert re.search("tracker.py:MLflow fails .ZeroDivisionError: .*metrics.jsonl is complete", record.getMessage())
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
def test_one_that_does_not_start_is_wrong_input(name, message, calls, tmp_path):
    (tmp_path / "starts_not.py").write_text("class Tracker: pass")
    with pytest.raises(InputError, match=f"trainer.logger has .*{message}"):
        write(tmp_path, [0], name=name)


def test_the_logger_takes_paths_of_classes():
    assert problems({"trainer.logger": ("console", "FILE.py:MLflow"), "trainer.project_name": "math"}) == []
    assert_one(problems({"trainer.logger": ("console", "mlflow")}), "must be some of console, .* or FILE.py:Class")
