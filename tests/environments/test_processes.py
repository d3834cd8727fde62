"""Laws: no token, reward or metric of episodes depends on the number of processes; a killed run resumes to the bit."""

import json
import signal

import pytest
from environments.test_episodes import FILE, several
from forked import COMMAND, Process, assert_succeeded, options, run_together, together
from parallel.test_processes import ONE_STEP, assert_alike
from ports import free_port
from small_run import assert_same_checkpoint, rows_without_clock, saved

FILTER = "algorithm.filter_groups"
# The environment fails on sums of 3; the first row, with which it is tried, is another.
PLAYED = {
    **ONE_STEP,
    "rollout.n": 4,
    "data.max_response_length": 48,
    "trainer.save_freq": 1,
    "environment.path": f"{FILE}:Sums",
    "environment.turn_template": "\n{observation} =",
    "environment.num_workers": 2,
    "environment.arguments": json.dumps({"most_s": 0.02, "first": "now: ", "fails_on": "3"}),
}
SEGMENTED = {
    "rollout.segment_length": 20,
    f"{FILTER}.leftover": "carry",
    f"{FILTER}.leftover_max_staleness": 4,
    "trainer.total_training_steps": 4,
}
TRAIN = COMMAND.format("train")
# The training command, which gets a signal while the tool of a third turn sleeps, once a checkpoint exists.
KILLED = """
import os, threading
from dapo_jax.environments.pool import EnvironmentPool
from dapo_jax.training import loop

step, sent = EnvironmentPool.step, []

def killed(self, play, text):
    reply = step(self, play, text)
    if len(play.actions) == 3 and os.path.exists({checkpoint!r}) and not sent:
        sent.append(play)
        threading.Timer(0.005, os.kill, (os.getpid(), {signal})).start()
    return reply

EnvironmentPool.step = killed
loop.main()
"""


def started(workdir, *, code=TRAIN, **changes):
    given = {**PLAYED, "workdir": workdir, **changes}
    if "data.task" in changes:  # another one than that of these options
        given = {name: value for name, value in given.items() if not name.startswith("data.arithmetic.")}
    return Process(code, options(given), {"JAX_NUM_CPU_DEVICES": "1"})


def in_two(workdir, *, codes=(TRAIN, TRAIN), **changes):
    port = free_port()
    given = [{"mesh.fsdp": 2, **together(port, number), **changes} for number in range(2)]
    return [started(workdir, code=code, **own) for code, own in zip(codes, given, strict=True)]


@pytest.mark.slow
@pytest.mark.long("several")
@pytest.mark.parametrize("name", ["whole", "segments", "several"])
def test_two_processes_play_as_one_and_a_killed_run_resumes_to_the_bit(name, tmp_path):
    changes = {"trainer.total_training_steps": 3} if name == "whole" else SEGMENTED
    if name == "several":
        changes = SEGMENTED | several(tmp_path, json.loads(PLAYED["environment.arguments"]))
    steps, after = changes["trainer.total_training_steps"], 2 if "rollout.segment_length" in changes else 1
    checkpoint = str(tmp_path / "killed" / "checkpoints" / str(after))
    killed = KILLED.format(checkpoint=checkpoint, signal=int(signal.SIGKILL))
    ended = run_together([started(tmp_path / "one", **changes)])  # which compiles for the one that is killed
    processes = in_two(tmp_path / "two", **changes)
    *further, last = run_together([*processes, started(tmp_path / "killed", code=killed, **changes)])
    ended += further
    assert_succeeded(ended)
    assert last.code == -signal.SIGKILL and after <= max(saved(tmp_path / "killed")) < steps, last.errors[-3000:]
    [last] = run_together([started(tmp_path / "killed", **{**changes, "environment.num_workers": 1})])
    assert last.code == 0, last.errors[-3000:]
    assert rows_without_clock(tmp_path / "killed") == rows_without_clock(tmp_path / "one")
    assert_same_checkpoint(tmp_path / "killed", tmp_path / "one")
    rows = rows_without_clock(tmp_path / "one")
    trained = [row["step"] for row in rows if "rollout/num_turns/mean" in row]
    assert_alike(tmp_path / "two", tmp_path / "one", steps, first=trained[0])
    assert len(trained) >= 2 and sum(row.get("environment/faults", 0) for row in rows) > 0


@pytest.mark.full
def test_a_signal_to_one_process_stops_both_while_they_wait_for_a_tool(tmp_path):
    arguments = {**json.loads(PLAYED["environment.arguments"]), "most_s": 0.3}
    changes = {"trainer.total_training_steps": 3, "environment.arguments": json.dumps(arguments)}
    stopped = KILLED.format(checkpoint=str(tmp_path / "checkpoints" / "1"), signal=int(signal.SIGTERM))
    ends = run_together(in_two(tmp_path, codes=(TRAIN, stopped), **changes))
    assert_succeeded(ends)
    assert "stopped by a signal to another process after step" in ends[0].errors
    assert 1 <= max(saved(tmp_path)) < 3
