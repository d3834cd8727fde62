"""Host: the trace of a profiled step holds that step and its stages by name; other steps leave none."""

import gzip
import json

import pytest
from small_run import small_config

from dapo_jax.monitor.profile import StepProfiles
from dapo_jax.training import train


def events(folder):
    """The named spans of the one trace in `folder`, which holds what the Trace Event Format knows, and no more."""
    [path] = folder.glob("plugins/profile/*/*.trace.json.gz")
    with gzip.open(path) as file:
        trace = json.load(file)
    assert set(trace) == {"displayTimeUnit", "traceEvents"}  # Perfetto finds no event in a trace with `metadata`
    assert {event["ph"] for event in trace["traceEvents"]} == {"M", "X"}
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert all(span["ts"] >= 0 and span["dur"] >= 0 and {"name", "pid", "tid"} <= set(span) for span in spans)
    return spans


def test_the_trace_of_a_step_holds_its_stages(tmp_path):
    train(small_config(tmp_path, **{"trainer.total_training_steps": 3, "trainer.profile_steps": (2,)}))
    assert [folder.name for folder in (tmp_path / "profile").iterdir()] == ["step_000002"]
    spans = events(tmp_path / "profile" / "step_000002")
    [whole] = [span for span in spans if span["name"] == "train"]
    assert whole["args"]["step_num"] == "2"
    for stage in ("gen", "reward", "adv", "update_actor"):
        found = [span for span in spans if span["name"] == stage]
        assert found, stage
        assert all(whole["ts"] <= span["ts"] <= whole["ts"] + whole["dur"] for span in found), stage
    assert not {"testing", "save_checkpoint"} & {span["name"] for span in spans}


def test_a_step_that_fails_leaves_a_trace_and_the_next_can_begin(tmp_path):
    for _ in range(2):
        profiles = StepProfiles(tmp_path, [1])
        with pytest.raises(RuntimeError):
            try:
                profiles.begin(1)
                raise RuntimeError
            finally:
                profiles.end()
                profiles.end()
    assert list(tmp_path.rglob("*.trace.json.gz"))
