"""A step that takes too long logs its stacks, and ends its process if asked to; everything else leaves nothing."""

import faulthandler
import subprocess
import sys
import threading
import time

import pytest
from forked import COMMAND, Process, options, run_together, together
from ports import free_port
from shapes import SMALL
from small_run import small_config
from waiting import wait_until

from dapo_jax.monitor import watchdog
from dapo_jax.monitor.watchdog import HUNG, Watchdog
from dapo_jax.run.parts import open_monitor

# Step 3 of a run hangs in its update. Steps before may take an hour: they compile, on busy machines.
HANGS = """
import time
from dapo_jax.training import step
from dapo_jax.monitor import watchdog

original, calls, watchdog.TIMES, watchdog.TOGETHER_S = step.update, [], 0, 3
begin = watchdog.Watchdog.begin
def limited(self, step):
    self.minutes = 0.2 if step == 3 else 60
    begin(self, step)
watchdog.Watchdog.begin = limited
def hangs(*arguments):
    calls.append(1)
    if len(calls) == 3:
        time.sleep(1000)
    return original(*arguments)
step.update = hangs
"""


def test_a_slow_step_logs_the_stacks_of_all_threads_and_others_nothing(monkeypatch, caplog):
    monkeypatch.setattr(watchdog, "TIMES", 0)  # the floor alone
    dog = Watchdog(minutes=0.05 / 60)
    dog.begin(1)
    time.sleep(0.15)  # compiles
    dog.end(done=True)
    time.sleep(0.1)  # evaluates
    dog.begin(2)
    dog.end()  # stops and saves
    time.sleep(0.1)
    assert not caplog.messages
    dog.begin(2)
    wait_until(lambda: caplog.messages)
    dog.end(done=True)
    assert caplog.messages[0].startswith("step 2 has taken more than 0 s")
    assert "thread MainThread:" in caplog.text and "in test_a_slow_step_logs_the_stacks" in caplog.text


def test_the_limit_is_ten_medians_and_the_judges_patience_and_nothing_is_watched_without_minutes():
    dog = Watchdog(minutes=0.01, patience_s=5.0)
    dog._seconds = [5.0, 7.0, 100.0]
    dog.begin(4)
    assert dog._timer is not None and dog._timer.interval == 75.0
    dog.end()
    assert dog._timer is None
    off = Watchdog()
    off._seconds = [5.0]
    off.begin(2)
    assert off._timer is None


def test_no_timer_outlives_a_run_that_fails(tmp_path, monkeypatch):
    config = small_config(tmp_path, **{"monitor.watchdog_ends": True})
    cancel, cancelled = faulthandler.cancel_dump_traceback_later, []
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: cancelled.append(cancel()))
    with pytest.raises(KeyError), open_monitor(config, initial_step=0) as monitor:
        monitor.watchdog._seconds = [1.0]
        monitor.watchdog.begin(2)
        timer = monitor.watchdog._timer
        raise KeyError
    assert isinstance(timer, threading.Timer) and timer.finished.is_set() and cancelled


def test_a_process_that_is_to_end_ends_though_nothing_can_be_logged():
    code = "from dapo_jax.monitor import watchdog as w; w.TOGETHER_S = 0; w.logger.error = None; "
    code += "w.Watchdog(ends=True)._report(2, 1)"
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == HUNG


@pytest.mark.slow
def test_all_processes_of_a_run_that_hangs_say_where_and_end(tmp_path):
    port, given = free_port(), {**SMALL, "monitor.watchdog_minutes": 0.2, "monitor.watchdog_ends": True}
    given |= {"workdir": tmp_path, "data.arithmetic.num_heldout": 0, "mesh.fsdp": 2, "trainer.test_freq": 10}
    ended = run_together(
        [
            Process(
                HANGS + COMMAND.format("train"),
                options({**given, **together(port, i)}),
                {"JAX_NUM_CPU_DEVICES": "1"},
            )
            for i in range(2)
        ]
    )
    assert [process.code for process in ended] == [HUNG, HUNG], ended
    texts = [(tmp_path / "train.log").read_text(), *(process.errors for process in ended)]
    for text in texts:
        assert "step 3 has taken more than 12 s" in text and "in hangs" in text, text
    assert "process 1: ERROR: step 3" in ended[1].errors
