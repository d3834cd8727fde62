"""Checkpoints know their run: another one does not continue from them, one that has moved or lost its workdir does."""

import dataclasses
import shutil
from contextlib import nullcontext

import pytest

from dapo_jax.config.sections import Config
from dapo_jax.config.values import with_values
from dapo_jax.monitor.recipe import write_config
from dapo_jax.monitor.records import METRICS, to_json_line
from dapo_jax.run import run_id
from dapo_jax.run.run_id import RunId, find_run_id, write_run_id


def run_at(workdir, checkpoints=""):
    return with_values(Config(workdir=str(workdir)), {"trainer.checkpoint_dir": str(checkpoints)})


@pytest.fixture
def saved(monkeypatch):
    """Who saved the checkpoints of a directory: its id and workdir."""
    found: dict[str, RunId] = {}
    monkeypatch.setattr(run_id, "saved_steps", lambda directory: [3] if directory in found else [])
    monkeypatch.setattr(run_id, "saved_by", lambda directory, step: found[directory])
    return found


def found_in(workdir, checkpoints=""):
    return find_run_id(str(workdir), str(checkpoints or workdir / "checkpoints"), str(workdir)).id


def test_checkpoints_of_another_run_are_refused_with_both_ways_out(tmp_path, saved):
    """A new workdir with a used trainer.checkpoint_dir continued the other run, and recorded options it never had."""
    shared, first, second = tmp_path / "shared", tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    own = find_run_id(str(first), str(shared), str(first))
    assert own.id and own.workdir == str(first)
    write_run_id(str(first), own)
    saved[str(shared)] = own
    assert found_in(first, shared) == own.id
    ways = (
        f"set workdir={first} to continue that run, or trainer.resume_from_path={shared} and a trainer.checkpoint_dir"
    )
    with pytest.raises(ValueError, match=ways):
        found_in(second, shared)
    write_run_id(str(second), RunId("other", str(second)))
    with pytest.raises(ValueError, match=f"holds checkpoints of the run in {first}, not of workdir={second}"):
        found_in(second, shared)


def test_a_workdir_that_was_lost_or_moved_is_the_same_run_and_a_copy_is_not(tmp_path, saved):
    shared, first, second = tmp_path / "shared", tmp_path / "first", tmp_path / "second"
    first.mkdir()
    saved[str(shared)] = RunId("a", str(first))
    assert found_in(first, shared) == "a"  # its records are lost; the same command was given
    write_run_id(str(first), RunId("a", str(first)))
    shutil.copytree(first, second)
    with pytest.raises(ValueError, match="holds checkpoints of the run in"):
        found_in(second, shared)
    saved[str(second / "checkpoints")] = RunId("a", str(first))
    assert found_in(second) == "a"  # the copy has its own checkpoints
    shutil.rmtree(first)
    assert found_in(second, shared) == "a"  # it was moved
    (second / run_id.RUN_ID).unlink()
    assert found_in(second) == "a"
    write_run_id(str(second), RunId("b", str(second)))
    with pytest.raises(ValueError, match="holds checkpoints of the run in"):
        found_in(second)  # another run's were copied into it


def test_checkpoints_of_earlier_versions_belong_to_the_workdir_that_records_their_directory(tmp_path, saved):
    shared, workdir = tmp_path / "shared", tmp_path / "run"
    workdir.mkdir()
    saved[str(shared)] = saved[str(workdir / "checkpoints")] = RunId("", "")
    assert found_in(workdir)
    with pytest.raises(ValueError, match="holds checkpoints of another run, not of workdir"):
        found_in(workdir, shared)
    write_config(workdir, dataclasses.asdict(run_at(workdir, shared)))
    assert found_in(workdir, shared)


def test_a_run_whose_checkpoints_are_gone_does_not_replace_its_records(tmp_path, saved):
    """Such as those of a directory that is not mounted."""
    saved_after = {"timing_s/save_checkpoint": 1.0}  # in the row of the next step
    for saves in ((), (3,), (3, 5)):  # the checkpoint of step 2 may be incomplete until that of step 4 begins
        rows = [{"step": step} | (saved_after if step in saves else {}) for step in range(1, 6)]
        (tmp_path / METRICS).write_text("".join(map(to_json_line, rows)))
        refused = pytest.raises(ValueError, match="records of 2 checkpoints, .* mount or restore it")
        with refused if len(saves) == 2 else nullcontext():
            found_in(tmp_path)
    saved[str(tmp_path / "checkpoints")] = RunId(found_in(tmp_path / "other"), str(tmp_path))
    found_in(tmp_path)
