"""Host: one process holds a lock; a successor takes it over from one that is gone, and from no other."""

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from etils import epath

import dapo_jax
from dapo_jax.monitor import lock

PROGRAM = """
import sys
from etils import epath
from dapo_jax.monitor import lock
workdir, machine, beat, dead_after = sys.argv[1:]
lock.BEAT_S, lock.DEAD_AFTER_S = float(beat), float(dead_after)
if machine:
    lock._machine = lambda: machine
try:
    with lock.locked(epath.Path(workdir)):
        print("held", flush=True)
        sys.stdin.read()
except ValueError as error:
    print(error, flush=True)
"""


class Starter:
    """Starts processes that hold a lock until their input ends, and ends them with the test."""

    def __init__(self, workdir: Path) -> None:
        self.workdir, self.running = workdir, []

    def __call__(self, *, machine: str = "", beat: float = 0.05, dead_after: float = 60.0) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(self.workdir), machine, str(beat), str(dead_after)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(dapo_jax.__file__).parents[1])},
        )
        self.running.append(process)
        return process

    def holder(self, **options) -> subprocess.Popen:
        process = self(**options)
        assert said(process) == "held"
        return process


def said(process: subprocess.Popen) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.fixture
def start(tmp_path):
    starter = Starter(tmp_path)
    yield starter
    for process in starter.running:
        process.kill()
        process.communicate()


def files(workdir: Path) -> list[str]:
    return sorted(path.name for path in workdir.iterdir())


def test_a_live_holder_keeps_its_lock(start, tmp_path):
    holder = start.holder()
    with pytest.raises(ValueError, match=rf"\(process {holder.pid} on .+, last heartbeat \d+ s ago\): wait for it"):
        with lock.locked(epath.Path(tmp_path)):
            pass
    other = start(machine="elsewhere")  # it sees no more than the signs of life
    assert f"locked by another run (process {holder.pid} on " in said(other)
    assert files(tmp_path) == ["lock.1"]


def test_a_released_lock_is_free_at_once(start, tmp_path, caplog):
    holder = start.holder(machine="elsewhere")
    holder.communicate()
    with lock.locked(epath.Path(tmp_path)):
        assert files(tmp_path) == ["lock.2"] and str(os.getpid()) in (tmp_path / "lock.2").read_text()
    assert "waiting" not in caplog.text


def test_the_lock_of_a_killed_process_of_this_machine_is_free_at_once(start, tmp_path, caplog):
    holder = start.holder()
    holder.kill()
    holder.wait(60)
    with lock.locked(epath.Path(tmp_path)):
        assert files(tmp_path) == ["lock.2"]
    assert "waiting" not in caplog.text


@pytest.mark.parametrize("kept", [False, True])
def test_the_lock_of_a_machine_that_is_gone_is_taken_over(start, tmp_path, monkeypatch, caplog, kept):
    """A restart on another machine was refused for as long as the NFS server kept the flock of the first."""
    holder = start.holder(machine="elsewhere")
    with open(tmp_path / "lock.1", "r+b") as file:
        holder.kill()
        holder.wait(60)
        if kept:  # as a server does that has not noticed
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        monkeypatch.setattr(lock, "DEAD_AFTER_S", 0.3)
        with lock.locked(epath.Path(tmp_path)):
            assert files(tmp_path) == ["lock.2"]
    assert f"is taken over from process {holder.pid} on" in caplog.text and "which gave no heartbeat" in caplog.text


def test_a_process_that_has_lost_its_lock_ends(start, tmp_path, monkeypatch):
    holder = start.holder(machine="elsewhere")
    holder.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(lock, "DEAD_AFTER_S", 0.3)
    with lock.locked(epath.Path(tmp_path)):
        holder.send_signal(signal.SIGCONT)
        assert holder.wait(60) == 1  # though its input has not ended
        _, errors = holder.communicate()
        assert f"is now locked by process {os.getpid()} on" in errors and "ends without saving" in errors
        assert files(tmp_path) == ["lock.2"]


def test_of_two_successors_one_wins(start, tmp_path):
    for _ in range(3):
        holder = start.holder(machine="elsewhere")
        holder.kill()
        holder.wait(60)
        successors = [start(dead_after=0.3) for _ in range(2)]
        answers = sorted(said(successor)[:4] for successor in successors)
        assert answers == ["held", "work"]  # workdir=... is locked by another run
        for successor in successors:
            successor.communicate()


def test_a_late_successor_does_not_go_back_to_an_older_lock(start, tmp_path, monkeypatch):
    with lock.locked(epath.Path(tmp_path)):
        pass
    later: list[subprocess.Popen] = []

    def two_others(*_):
        start.holder().communicate()
        later.append(start.holder())

    monkeypatch.setattr(lock, "_wait_for_end", two_others)
    with pytest.raises(ValueError, match="locked by another run"):
        with lock.locked(epath.Path(tmp_path)):
            pass
    assert files(tmp_path) == ["lock.3"] and later[0].poll() is None


def test_without_flock_the_signs_of_life_decide(start, tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(95, "Operation not supported")

    holder = start.holder()
    monkeypatch.setattr("fcntl.flock", unsupported)
    with pytest.raises(ValueError, match=f"process {holder.pid} on .+, last heartbeat just now"):
        with lock.locked(epath.Path(tmp_path)):
            pass
    monkeypatch.setattr(lock, "DEAD_AFTER_S", 0.3)
    holder.kill()
    holder.wait(60)
    with lock.locked(epath.Path(tmp_path)):
        assert files(tmp_path) == ["lock.2"]


def test_a_lock_that_says_nothing_is_watched(tmp_path, monkeypatch):
    (tmp_path / "lock.7").write_bytes(b"")  # its process ended before it wrote
    monkeypatch.setattr(lock, "DEAD_AFTER_S", 0.3)
    with lock.locked(epath.Path(tmp_path)):
        assert files(tmp_path) == ["lock.8"]
