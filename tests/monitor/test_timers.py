"""Stage timers add up; a process that works longer than the others is a metric and an alarm, waiting is not work."""

import itertools
import json
import time

import pytest
from forked import COMMAND, Process, options, run_together, together
from ports import free_port
from shapes import SMALL

from dapo_jax.config.sections import AlarmConfig
from dapo_jax.monitor import timers
from dapo_jax.monitor.alarms import raise_alarms
from dapo_jax.monitor.timers import StageTimers, own_seconds, slowest_process
from dapo_jax.parallel.processes import waiting


def test_stages_nest_add_up_even_if_they_raise_and_reset_each_step(monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(timers, "perf_counter", lambda: float(next(clock)))  # one second a reading
    stages = StageTimers()
    with stages.time("step"):
        with stages.time("gen"):
            pass
        with pytest.raises(KeyError), stages.time("gen"):
            raise KeyError
    assert stages.pop() == {"timing_s/gen": 2.0, "timing_s/step": 5.0}
    assert stages.pop() == {}
    with stages.time("gen"):
        pass
    assert stages.pop() == {"timing_s/gen": 1.0}
    assert stages.totals == {"gen": 3.0, "step": 5.0}


def test_waiting_is_no_work_and_the_first_step_does_not_count():
    stages = StageTimers()
    with stages.time("gen"):
        pass
    assert stages.pop_own() == {}
    with stages.time("gen"):
        time.sleep(0.05)
        with waiting():
            time.sleep(0.2)
    [seconds] = stages.pop_own().values()
    assert 0.05 <= seconds < 0.2 and stages.totals["gen"] >= 0.25


def test_the_slowest_is_compared_with_the_median_and_short_times_with_nothing():
    assert own_seconds({"gen": 2, "reward": 1, "filter": 3, "update_actor": 4, "testing": 9}) == [2, 4, 4]
    assert slowest_process([[9.0, 1.0, 1.0]]) == {}
    of_two = slowest_process([[8.0, 0.5, 0.0], [2.0, 0.001, 0.0]])
    assert list(of_two.values()) == [0, 4.0, 1.0, 1.0] and "time/slowest_process/sampling" in of_two
    assert slowest_process([[3.0, 3, 3], [2.0, 2, 2], [6.0, 3, 3]])["time/slowest_process/sampling"] == 2.0
    for found, alarm in ((of_two, 1), ({"time/slowest_process": 7, "time/slowest_process/update": 2.9}, 0), ({}, 0)):
        assert raise_alarms(found, {}, AlarmConfig(), 2)[0]["alarm/slow_process"] == alarm


@pytest.mark.full
def test_a_process_whose_verifier_is_slow_is_a_metric_and_an_alarm(tmp_path):
    port, folder = free_port(), tmp_path / "run"
    given = {**SMALL, "workdir": folder, "data.arithmetic.num_heldout": 0, "trainer.test_freq": 10, "mesh.fsdp": 2}
    given |= {
        "trainer.total_training_steps": 2,
        "monitor.alarms.slow_process": 2.0,
        "reward.function": f"{tmp_path}/own.py:score",
    }
    (tmp_path / "own.py").write_text(
        "import os, time\n"
        "def score(data_source, solution, ground_truth, extra_info):\n"
        "    time.sleep(float(os.environ['SLEEPS']))\n"
        "    return len(solution) % 2\n"
    )
    ended = run_together(
        [
            Process(
                COMMAND.format("train"),
                options({**given, **together(port, process)}),
                {"JAX_NUM_CPU_DEVICES": "1", "SLEEPS": str(0.15 * process)},
            )
            for process in range(2)
        ]
    )
    assert [process.code for process in ended] == [0, 0], ended
    first, second = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()[-2:])
    assert "time/slowest_process/rewards" not in first and first["alarm/slow_process"] == 0
    assert second["time/slowest_process/rewards"] > 2 and second["alarm/slow_process"] == 1
    assert second["time/slowest_process"] == 1
    assert second["time/slowest_process/sampling"] < 2 and second["time/slowest_process/update"] < 2
