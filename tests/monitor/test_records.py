"""Host: records of a run are exact, standard, and the same after a stop as without one."""

import dataclasses
import json
import os

import jax.numpy as jnp
import numpy as np
import pytest
from event_files import events_of
from tensorboardX.proto.event_pb2 import SessionLog

from dapo_jax.config.sections import Config
from dapo_jax.config.values import flat, flatten, with_values
from dapo_jax.errors import InputError
from dapo_jax.monitor.recipe import config_differences, read_config, write_config
from dapo_jax.monitor.records import RunRecords, read_metrics


def write_run(workdir, steps, *, resume_step=None):
    with RunRecords(workdir, resume_step=resume_step) as records:
        for step in steps:
            records.write(step, {"actor/pg_loss": float(step)})
            records.write_samples(step, [{"response": f"answer {step}", "score": 1.0}])


def shown_values(workdir):
    """(step, tag, number or text) that TensorBoard shows: START hides earlier events from its step on."""
    shown = []
    for event in events_of(workdir):
        if event.session_log.status == SessionLog.START:
            shown = [entry for entry in shown if entry[0] < event.step]
        for value in event.summary.value:
            if value.metadata.plugin_data.plugin_name in ("custom_scalars", "hparams"):
                continue  # of the run, not of a step: see test_tensorboard.py
            text = value.tensor.string_val
            shown.append((event.step, value.tag, text[0].decode() if text else value.simple_value))
    return shown


def test_rows_hold_step_and_python_floats(tmp_path):
    records = RunRecords(tmp_path / "new" / "run", resume_step=None)
    records.write(0, {"eval/gsm8k/acc/mean@4": 0.25})
    records.write(1, {"a": 1, "b": np.float32(0.1), "c": jnp.asarray(2.5), "d": np.array(True)})
    records.close()
    records.close()
    rows = read_metrics(tmp_path / "new" / "run")
    assert rows == [
        {"step": 0, "eval/gsm8k/acc/mean@4": 0.25},
        {"step": 1, "a": 1.0, "b": float(np.float32(0.1)), "c": 2.5, "d": 1.0},
    ]
    assert all(type(value) is float for value in list(rows[1].values())[1:])


def test_a_row_is_on_disk_and_in_tensorboard_when_write_returns(tmp_path, monkeypatch):
    with RunRecords(tmp_path, resume_step=None) as records:
        rows, synced_sizes = os.stat(tmp_path / "metrics.jsonl").st_ino, []

        def fsync(file):
            if os.fstat(file).st_ino == rows:
                synced_sizes.append(os.fstat(file).st_size)

        monkeypatch.setattr(os, "fsync", fsync)
        for step in range(2):
            records.write(step, {"a": 1.0})
            assert synced_sizes == [len('{"step": 0, "a": 1.0}\n') * (row + 1) for row in range(step + 1)]
            assert shown_values(tmp_path)[-1] == (step, "a", 1.0)


def test_numbers_that_are_not_finite_are_null_and_not_in_tensorboard(tmp_path):
    with RunRecords(tmp_path, resume_step=None) as records:
        records.write(1, {"loss": float("nan"), "ratio": np.inf, "lr": 0.5})
        records.write_samples(1, [{"score": np.float32("nan"), "length": np.int64(3)}])
    assert read_metrics(tmp_path) == [{"step": 1, "loss": None, "ratio": None, "lr": 0.5}]
    (sample,) = (tmp_path / "samples/step_000001.jsonl").read_text().splitlines()
    assert json.loads(sample, parse_constant=pytest.fail) == {"score": None, "length": 3}
    assert [tag for _, tag, _ in shown_values(tmp_path)] == ["lr", "samples/text_summary"]


def test_what_is_not_a_number_is_named(tmp_path):
    with RunRecords(tmp_path, resume_step=None) as records:
        for value in ("0.5", None, [1.0], np.zeros(2), {}, 1j):
            with pytest.raises(TypeError, match="'actor/lr'"):
                records.write(1, {"actor/pg_loss": 0.0, "actor/lr": value})
    assert read_metrics(tmp_path) == []


def test_a_step_is_written_once(tmp_path):
    with RunRecords(tmp_path, resume_step=3) as records:
        with pytest.raises(ValueError, match="step=3 must be greater than the last step, 3"):
            records.write(3, {"a": 1.0})
        records.write(4, {"a": 1.0})
        with pytest.raises(ValueError, match="step=4"):
            records.write(4, {"b": 1.0})
        with pytest.raises(ValueError, match='metric "step"'):
            records.write(5, {"step": 1.0})


def test_samples_are_written_as_lines_and_as_text(tmp_path):
    samples = [{"prompt": "1+1=?\n", "response": "二 ``` <b>", "score": 1.0}]
    samples += [{"kind": "of_mine", "response": "", "score": -1.0, "ground_truth": "2"}]
    with RunRecords(tmp_path, resume_step=None) as records:
        records.write_samples(12, samples)
    lines = (tmp_path / "samples/step_000012.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == samples and "二" in lines[0]
    ((step, tag, text),) = shown_values(tmp_path)
    assert (step, tag) == (12, "samples/text_summary")
    rows = ["|  | 1+1=?<br> | 二 &#96;&#96;&#96; &#60;b&#62; |  | 1 |", "| of&#95;mine |  |  | 2 | -1 |"]
    assert text.splitlines() == ["| kind | prompt | response | right answer | score |", "|" + " --- |" * 5, *rows]


@pytest.mark.parametrize("torn", ["", '{"step": 5, "actor/pg_lo', '{"step": 5, "acc/加'])
def test_a_resumed_run_leaves_what_an_unbroken_one_does(tmp_path, torn):
    write_run(tmp_path / "unbroken", range(7))
    write_run(tmp_path / "stopped", range(5))
    with open(tmp_path / "stopped/metrics.jsonl", "ab") as file:
        file.write(torn.encode()[:-1])
    write_run(tmp_path / "stopped", range(3, 7), resume_step=2)

    for name in ("metrics.jsonl", "samples/step_000001.jsonl", "samples/step_000004.jsonl"):
        assert (tmp_path / "stopped" / name).read_bytes() == (tmp_path / "unbroken" / name).read_bytes()
    assert shown_values(tmp_path / "stopped") == shown_values(tmp_path / "unbroken")
    assert not list(tmp_path.rglob("*.tmp"))


def test_resuming_drops_later_rows_and_samples_at_once_and_a_new_run_all(tmp_path, caplog):
    write_run(tmp_path, range(6))
    for resume_step, kept, dropped in ((2, [0, 1, 2], "3 rows from step 3"), (None, [], "3 rows from step 0")):
        RunRecords(tmp_path, resume_step=resume_step).close()
        assert [row["step"] for row in read_metrics(tmp_path)] == kept
        files = sorted(path.name for path in (tmp_path / "samples").iterdir())
        assert files == [f"step_{step:06d}.jsonl" for step in kept]
        assert {step for step, _, _ in shown_values(tmp_path)} == set(kept)
        assert f"dropped {dropped} on" in caplog.text


def test_rows_that_are_missing_on_resume_are_reported(tmp_path, caplog):
    write_run(tmp_path, range(3))
    RunRecords(tmp_path, resume_step=2).close()
    RunRecords(tmp_path / "fresh", resume_step=None).close()
    assert not caplog.text
    RunRecords(tmp_path, resume_step=5).close()
    assert "steps 3 to 5 have no row" in caplog.text


def test_only_the_last_line_may_be_cut_off(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}')
    assert read_metrics(tmp_path) == [{"step": 1}, {"step": 2}]
    path.write_text('{"step": 1}\n{"ste\n{"step": 3}\n')
    with pytest.raises(RuntimeError, match="metrics.jsonl, line 2: not JSON"):
        read_metrics(tmp_path)


def test_a_copy_beside_the_samples_is_left_alone_and_a_row_that_is_none_is_named(tmp_path):
    """Both were reported as a bug in dapo_jax."""
    write_run(tmp_path, range(3))
    copy, later = tmp_path / "samples" / "step_1 (copy).jsonl", tmp_path / "samples" / "step_000009.jsonl"
    for path in (copy, later):
        path.write_text("{}\n")
    RunRecords(tmp_path, resume_step=2).close()
    assert copy.exists() and not later.exists()
    for line in ("null", "[1]", '{"loss": 1}'):
        (tmp_path / "metrics.jsonl").write_text(f'{{"step": 0}}\n{line}\n{{"step": 1}}\n')
        with pytest.raises(InputError, match="metrics.jsonl has a line without a step, line 2: fix or remove the line"):
            RunRecords(tmp_path, resume_step=2)


def test_options_of_another_version_are_named_with_the_file_and_the_versions(tmp_path):
    assert read_config(tmp_path) is None
    values = dataclasses.asdict(Config())
    write_config(tmp_path, values | {"actor": values["actor"] | {"surprise": 1}})
    for versions, writer in ({}, "of another version"), ({"dapo_jax": "9.1"}, "9.1"):
        (tmp_path / "environment.json").write_text(json.dumps({"versions": versions}))
        told = rf"{tmp_path}/config.json has options that .* does not know: actor.surprise; .* by dapo_jax {writer}:"
        with pytest.raises(InputError, match=told):
            read_config(tmp_path)


def test_a_run_of_an_earlier_version_may_have_chosen_an_engine(tmp_path):
    values = dataclasses.asdict(with_values(Config(), {"rollout.engine": "auto", "workdir": str(tmp_path)}))
    write_config(tmp_path, values)
    config = read_config(tmp_path)
    assert config.rollout.engine is None and config_differences(tmp_path, flat(config)) == []


def test_config_differences_name_key_and_both_values(tmp_path):
    config = {"seed": 0, "actor": {"optim": {"lr": 1e-6, "betas": (0.9, 0.95)}, "loss": "ppo"}, "mesh": {}}
    assert config_differences(tmp_path, flatten(config)) == []
    write_config(tmp_path / "run", config)
    assert config_differences(tmp_path / "run", flatten(config)) == []
    optim = {"lr": 2e-6, "betas": (0.9, 0.99)}
    other = {"seed": 0, "actor": {"optim": optim, "clip": None}, "mesh": {"data": 2}}
    assert config_differences(tmp_path / "run", flatten(other)) == [
        "actor.clip: absent -> None",
        "actor.loss: 'ppo' -> absent",
        "actor.optim.betas: [0.9, 0.95] -> [0.9, 0.99]",
        "actor.optim.lr: 1e-06 -> 2e-06",
        "mesh: {} -> absent",
        "mesh.data: absent -> 2",
    ]
    assert json.loads((tmp_path / "run" / "config.json").read_text())["actor"]["optim"]["lr"] == 1e-6
