"""Host: stage timers add up, reset each step, and keep the run's totals."""

import itertools

import pytest

from dapo_jax.monitor import timers
from dapo_jax.monitor.timers import StageTimers


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
