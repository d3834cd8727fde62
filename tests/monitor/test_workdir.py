"""Host: a work directory has one run at a time, and keeps the traceback of a failure."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import dapo_jax
from dapo_jax.monitor.workdir import open_workdir

HOLDER = """
import subprocess, sys, time
from dapo_jax.monitor.workdir import open_workdir
with open_workdir(sys.argv[1], detailed=False):
    child = subprocess.Popen(["sleep", "60"], close_fds=False, stdout=subprocess.DEVNULL)
    print(child.pid, flush=True)
    time.sleep(60)
"""


def hold(workdir: Path) -> tuple[subprocess.Popen, int]:
    """A process that holds `workdir`, and the number of one that it has started."""
    environment = {**os.environ, "PYTHONPATH": str(Path(dapo_jax.__file__).parents[1])}
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(workdir)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert holder.stdout is not None
    return holder, int(holder.stdout.readline())


def test_a_held_directory_names_its_holder_and_a_killed_one_is_free_though_its_workers_live(tmp_path):
    holder, worker = hold(tmp_path)
    try:
        told = rf"locked by another run \(process {holder.pid} on .+ ago\): .*--config.workdir=DIR"
        with pytest.raises(ValueError, match=told):
            with open_workdir(tmp_path, detailed=False):
                pass
        holder.send_signal(signal.SIGKILL)
        holder.wait(60)
        os.kill(worker, 0)  # it lives
        with open_workdir(tmp_path, detailed=False):
            assert str(os.getpid()) in (tmp_path / "lock.2").read_text()
    finally:
        holder.kill()
        os.kill(worker, signal.SIGKILL)


def test_one_process_cannot_open_it_twice_but_again(tmp_path):
    with open_workdir(tmp_path, detailed=False):
        with pytest.raises(ValueError, match="locked by another run"):
            with open_workdir(tmp_path, detailed=False):
                pass
        with open_workdir(tmp_path, detailed=False, process=1):  # another process of the same run
            pass
    with open_workdir(tmp_path, detailed=False):
        pass


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
            with open_workdir(place, detailed=False):
                pass
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # as for a user without the right
    with pytest.raises(ValueError, match=rf"workdir={tmp_path} must be .*Permission denied.*let this user write"):
        with open_workdir(tmp_path, detailed=False):
            pass
    assert (tmp_path / "file").read_text() == "kept"


def test_a_full_disk_is_no_wrong_input(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        with open_workdir(tmp_path, detailed=False):
            pass
