"""Host: a work directory has one run at a time, and keeps the traceback of a failure."""

import os
from pathlib import Path

import pytest

from dapo_jax.monitor.workdir import open_workdir, run_name


def open_and_close(workdir, **options):
    with open_workdir(workdir, detailed=False, **options):
        pass


def test_one_process_cannot_open_it_twice_but_again(tmp_path):
    with open_workdir(tmp_path, detailed=False):
        with pytest.raises(ValueError, match="locked by another run"):
            open_and_close(tmp_path)
        open_and_close(tmp_path, process=1)  # another process of the same run
    open_and_close(tmp_path)
    assert [run_name(Path(folder)) for folder in ("runs/ten", "runs/arm/seed_10")] == ["ten", "arm/seed_10"]


def test_the_traceback_of_a_failure_is_in_the_log_and_not_on_the_console(tmp_path, capsys):
    with pytest.raises(ZeroDivisionError):
        with open_workdir(tmp_path, detailed=True):
            print(1 // 0)
    log = (tmp_path / "train.log").read_text()
    assert "ERROR: the run ends: " in log and "Traceback" in log and "print(1 // 0)" in log
    assert capsys.readouterr().err == ""


def test_a_place_that_cannot_be_written_to_is_refused_with_the_cure(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("kept")
    for place in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nowhere")):
        with pytest.raises(ValueError, match=rf"workdir={place} must be a directory .*: choose another by"):
            open_and_close(place)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # as for a user without the right
    with pytest.raises(ValueError, match=rf"workdir={tmp_path} must be .*Permission denied.*let this user write"):
        open_and_close(tmp_path)
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize(("module", "name"), [(os, "write"), (Path, "mkdir")])
def test_a_full_disk_is_no_wrong_input(tmp_path, monkeypatch, module, name):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, name, full)
    with pytest.raises(OSError, match="No space left"):
        open_and_close(tmp_path)
