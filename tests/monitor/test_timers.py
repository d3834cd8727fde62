"""Host: stage timers add up, reset each step, and keep the run's totals."""

import itertools

import pytest

from dapo_jax.monitor import timers
from dapo_jax.monitor.timers import StageTimers


@pytest.fixture(autouse=True)
def one_second_a_reading(monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(timers, "perf_counter", lambda: float(next(clock)))


def test_a_stage_that_repeats_is_summed_and_stages_nest():
    stages = StageTimers()
    with stages.time("step"):
        with stages.time("gen"):
            pass
        with stages.time("gen"):
            pass
    assert stages.pop() == {"timing_s/gen": 2.0, "timing_s/step": 5.0}


def test_pop_resets_the_step_and_not_the_totals():
    stages = StageTimers()
    for _ in range(2):
        with stages.time("gen"):
            pass
        assert stages.pop() == {"timing_s/gen": 1.0}
    assert stages.pop() == {}
    assert stages.totals == {"gen": 2.0}


def test_a_stage_that_raises_is_counted():
    stages = StageTimers()
    with pytest.raises(KeyError), stages.time("gen"):
        raise KeyError
    assert stages.pop() == {"timing_s/gen": 1.0}
