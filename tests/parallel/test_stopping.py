"""When a run stops after a signal, and when it does not."""

import os
import signal
import subprocess
import sys
import threading

import pytest
from waiting import LIMIT_S, wait_until

from dapo_jax.parallel import stopping
from dapo_jax.parallel.stopping import Pace, Stopped, StopRequest


def ask(number=signal.SIGTERM):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_waits_for_a_safe_point(number):
    with StopRequest() as stop:
        with stop.safe():
            stop.check()
        ask(number)
        stop.check()  # not safe here
        with stop.safe(), pytest.raises(Stopped, match=number.name):
            stop.check()


def test_before_the_first_safe_point_it_stops_there_and_then():
    with StopRequest(), pytest.raises(Stopped, match="SIGTERM before the first step"):
        ask()
        wait_until(lambda: False)


def test_a_signal_that_arrives_twice_at_once_counts_once(monkeypatch):
    monkeypatch.setattr(stopping, "_REPEATED_S", LIMIT_S)
    with StopRequest() as stop:
        with stop.safe():
            pass
        ask()
        ask()
        ask(signal.SIGINT)
        with stop.safe(), pytest.raises(Stopped):
            stop.check()


TWICE = """
import os, signal
from dapo_jax.parallel import stopping

stopping._REPEATED_S = 0.0
with stopping.StopRequest() as stop:
    with stop.safe():
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    print("goes on", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    print("too far", flush=True)
"""


def test_a_second_signal_ends_the_process_at_once():
    ended = subprocess.run([sys.executable, "-c", TWICE], capture_output=True, text=True)
    assert ended.returncode == -signal.SIGTERM and ended.stdout == "goes on\n"


def test_handlers_are_given_back_and_threads_hear_nothing():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    failures = []

    def enter():
        try:
            with StopRequest() as stop, stop.safe():
                stop.check()
        except BaseException as error:
            failures.append(error)

    with StopRequest():
        assert signal.getsignal(signal.SIGTERM) != before[0]
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before and not failures


def test_what_needs_patience_is_not_stopped_before_it_has_run_out():
    patience = [1000.0]
    with StopRequest() as stop, stop.safe(lambda: patience[0]):
        ask()
        stop.check()
        patience[0] = 0.0
        with pytest.raises(Stopped):
            stop.check()


def test_the_host_stays_two_micro_batches_ahead_and_stops_between_them(monkeypatch):
    waited, checks = [], []
    monkeypatch.setattr(stopping.jax, "block_until_ready", waited.append)
    pace = Pace(lambda: checks.append(len(waited)))
    for number in range(5):
        pace(number)
    assert waited == [0, 1, 2] and checks == [0, 0, 1, 2, 3]


@pytest.mark.parametrize(("long", "num_calls"), [(1000.0, 24), (0.0, 10)])
def test_several_processes_ask_each_other_now_and_then_and_always_where_that_takes_long(monkeypatch, long, num_calls):
    monkeypatch.setattr(stopping.jax, "process_count", lambda: 2)
    asked, calls = [], []

    def any_process(*values):
        asked.append(values[0])
        return len(asked) == 3, values[1]

    monkeypatch.setattr(stopping, "any_process", any_process)
    monkeypatch.setattr(stopping, "_LONG_S", long)
    stop = StopRequest()
    with pytest.raises(Stopped, match="another process"), stop.safe():
        for call in range(100):
            calls.append(call)
            stop.check()
    assert asked == [False] * 3 and len(calls) == num_calls
