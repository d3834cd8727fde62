"""Host: one process holds a lock; a successor takes it over from one that is gone, and from no other."""

import fcntl
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from etils import epath

import dapo_jax
from dapo_jax.monitor import lock

# The worker has the descriptors of the process, and outlives it if that is killed.
PROGRAM = """
import subprocess, sys
from etils import epath
from dapo_jax.monitor import lock
workdir, machine, dead_after = sys.argv[1:]
lock.BEAT_S, lock.DEAD_AFTER_S = 0.05, float(dead_after)
if machine:
    lock._machine = lambda: machine
try:
    with lock.locked(epath.Path(workdir)):
        worker = subprocess.Popen(["cat"], close_fds=False)
        print("held", flush=True)
        sys.stdin.read()
except ValueError as error:
    print(error, flush=True)
"""


@pytest.fixture
def start(tmp_path):
    """Starts a process that holds the lock until its input ends, or that says why it does not."""
    with ExitStack() as started:

        def start(*, machine="", dead_after=60.0):
            process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(tmp_path), machine, str(dead_after)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": str(Path(dapo_jax.__file__).parents[1])},
            )
            started.enter_context(process)
            started.callback(process.kill)
            return process

        yield start


def said(process):
    return process.stdout.readline().strip()


def hold(start, **options):
    holder = start(**options)
    assert said(holder) == "held"
    return holder


def kill(holder):
    """Its worker lives: it still answers."""
    holder.kill()
    holder.wait(60)
    holder.stdin.write("alive\n")
    holder.stdin.flush()
    assert said(holder) == "alive"


def take(workdir):
    """Takes the lock and gives it back; returns the files that there are meanwhile."""
    with lock.locked(epath.Path(workdir)):
        return sorted(path.name for path in workdir.iterdir())


def test_a_live_holder_keeps_its_lock(start, tmp_path):
    holder = hold(start)
    told = rf"\(process {holder.pid} on .+, last heartbeat \d+ s ago\): wait for it, .* by --config.workdir=DIR"
    with pytest.raises(ValueError, match=told):
        take(tmp_path)
    other = start(machine="elsewhere")  # it sees no more than the signs of life
    assert f"locked by another run (process {holder.pid} on " in said(other)
    assert os.listdir(tmp_path) == ["lock.1"]


@pytest.mark.parametrize(("end", "machine"), [(subprocess.Popen.communicate, "elsewhere"), (kill, "")])
def test_a_released_lock_and_that_of_a_killed_process_of_this_machine_are_free_at_once(
    start, tmp_path, caplog, end, machine
):
    end(hold(start, machine=machine))
    with lock.locked(epath.Path(tmp_path)):
        assert os.listdir(tmp_path) == ["lock.2"] and str(os.getpid()) in (tmp_path / "lock.2").read_text()
    assert "waiting" not in caplog.text


@pytest.mark.parametrize("kept", [False, True])
def test_the_lock_of_a_machine_that_is_gone_is_taken_over(start, tmp_path, monkeypatch, caplog, kept):
    """A restart on another machine was refused for as long as the NFS server kept the flock of the first."""
    holder = hold(start, machine="elsewhere")
    with open(tmp_path / "lock.1", "r+b") as file:
        kill(holder)
        if kept:  # as a server does that has not noticed
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        monkeypatch.setattr(lock, "DEAD_AFTER_S", 0.3)
        assert take(tmp_path) == ["lock.2"]
    assert f"is taken over from process {holder.pid} on" in caplog.text and "which gave no heartbeat" in caplog.text


def test_a_process_that_has_lost_its_lock_ends(start, tmp_path, monkeypatch):
    holder = hold(start, machine="elsewhere")
    holder.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(lock, "DEAD_AFTER_S", 0.3)
    with lock.locked(epath.Path(tmp_path)):
        holder.send_signal(signal.SIGCONT)
        assert holder.wait(60) == 1  # though its input has not ended
        _, errors = holder.communicate()
        assert f"is now locked by process {os.getpid()} on" in errors and "ends without saving" in errors
        assert os.listdir(tmp_path) == ["lock.2"]


def test_of_two_successors_one_wins(start):
    for _ in range(3):
        kill(hold(start, machine="elsewhere"))
        successors = [start(dead_after=0.3) for _ in range(2)]
        answers = sorted(said(successor)[:4] for successor in successors)
        assert answers == ["held", "work"]  # workdir=... is locked by another run
        for successor in successors:
            successor.communicate()


def test_a_late_successor_does_not_go_back_to_an_older_lock(start, tmp_path, monkeypatch):
    take(tmp_path)
    later = []

    def two_others(*_):
        hold(start).communicate()
        later.append(hold(start))

    monkeypatch.setattr(lock, "_wait_for_end", two_others)
    with pytest.raises(ValueError, match="locked by another run"):
        take(tmp_path)
    assert os.listdir(tmp_path) == ["lock.3"] and later[0].poll() is None


def test_without_flock_the_signs_of_life_decide(start, tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(95, "Operation not supported")

    holder = hold(start)
    monkeypatch.setattr("fcntl.flock", unsupported)
    with pytest.raises(ValueError, match=f"process {holder.pid} on .+, last heartbeat just now"):
        take(tmp_path)
    monkeypatch.setattr(lock, "DEAD_AFTER_S", 0.3)
    kill(holder)
    assert take(tmp_path) == ["lock.2"]


def test_a_lock_that_says_nothing_is_watched(tmp_path, monkeypatch):
    (tmp_path / "lock.7").write_bytes(b"")  # its process ended before it wrote
    monkeypatch.setattr(lock, "DEAD_AFTER_S", 0.3)
    assert take(tmp_path) == ["lock.8"]
