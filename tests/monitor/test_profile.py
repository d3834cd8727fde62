"""Host: the trace of a profiled step holds that step and its stages by name; other steps leave none."""

import gzip
import json
import os
import shutil
import subprocess
import urllib.parse
import urllib.request
from contextlib import suppress

import pytest
from ports import free_port
from small_run import small_config
from waiting import wait_until

from dapo_jax.monitor.console import Console
from dapo_jax.monitor.monitor import Monitor, StepProfiles
from dapo_jax.monitor.timers import StageTimers
from dapo_jax.training.loop import train

STAGES = ("gen", "reward", "adv", "update_actor")
XPROF = os.environ.get("XPROF") or shutil.which("xprof")


def run_the_loop(workdir):
    profiles = StepProfiles(workdir / "profile", (2,))
    monitor = Monitor(Console(3, initial_step=0, enabled=False), StageTimers(), profiles)
    for step in (1, 2, 3):
        profiles.begin(step)
        for stage in STAGES:
            with monitor.stage(stage):
                pass
        profiles.end()
        with monitor.stage("testing"):
            pass


def run_a_training(workdir):
    train(small_config(workdir, **{"trainer.total_training_steps": 2, "trainer.profile_steps": (2,)}))


@pytest.mark.short("the_loop")
@pytest.mark.parametrize("run", [run_the_loop, run_a_training])
def test_the_trace_of_a_step_holds_its_stages_and_what_the_trace_event_format_knows(run, tmp_path):
    run(tmp_path)
    assert [folder.name for folder in (tmp_path / "profile").iterdir()] == ["step_000002"]
    [path] = tmp_path.glob("profile/*/plugins/profile/*/*.trace.json.gz")
    trace = json.loads(gzip.decompress(path.read_bytes()))
    assert set(trace) == {"displayTimeUnit", "traceEvents"}  # Perfetto finds no event in a trace with `metadata`
    assert {event["ph"] for event in trace["traceEvents"]} == {"M", "X"}
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert all(span["ts"] >= 0 and span["dur"] >= 0 and {"name", "pid", "tid"} <= set(span) for span in spans)
    [whole] = [span for span in spans if span["name"] == "train"]
    assert whole["args"]["step_num"] == "2"
    for stage in STAGES:
        found = [span for span in spans if span["name"] == stage]
        assert found, stage
        assert all(whole["ts"] <= span["ts"] <= whole["ts"] + whole["dur"] for span in found), stage
    assert not {"testing", "save_checkpoint"} & {span["name"] for span in spans}


@pytest.mark.viewers
@pytest.mark.skipif(XPROF is None, reason="no xprof")
def test_xprof_shows_the_step(tmp_path):
    assert XPROF is not None
    run_a_training(tmp_path)
    port = free_port()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def get(path: str, **asked: str) -> bytes:
        url = f"http://localhost:{port}/data/plugin/profile/{path}?{urllib.parse.urlencode(asked)}"
        return gzip.decompress(opener.open(url, timeout=60).read())

    def runs() -> list[str]:
        with suppress(OSError):
            return json.loads(get("runs"))
        return []

    command = [XPROF, "--logdir", str(tmp_path / "profile"), "--port", str(port)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
        try:
            [run] = wait_until(runs)
            assert run.startswith("step_000002/") and "overview_page" in json.loads(get("run_tools", run=run))
            [host] = json.loads(get("hosts", run=run, tag="trace_viewer@"))
            shown = get("data", run=run, tag="trace_viewer@", host=host["hostname"]).decode()
        finally:
            server.terminate()
    assert all(f'"{stage}"' in shown for stage in STAGES)


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
