"""Law: training steps do not depend on the number of processes; if one ends, no other keeps waiting."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple, TextIO

import jax
import numpy as np
import pytest
from ports import free_port
from shapes import SMALL
from small_run import CONFIGS, assert_same_policy, rows_without_clock, small_config
from waiting import LIMIT_S

from dapo_jax.base_models import read_model
from dapo_jax.checkpoint import Checkpoints
from dapo_jax.config.derived import checkpoint_dir
from dapo_jax.export import export
from dapo_jax.learner.actor import build_actor
from dapo_jax.monitor.tensorboard import EVENTS
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.settings import actor_settings
from dapo_jax.training import train

WITHOUT_TENSOR = {"mesh.train_tensor": 1, "actor.ppo_micro_batch_size_per_device": 2}  # in training
OPTIONS = {
    **SMALL,
    "actor.optim.eps": 1e-6,  # Adam divides by what is smaller: with 1e-8 it makes steps of rounding errors
}


# The training command, which receives a signal when it starts to train on a step.
SIGNALLED = """
import os, signal, sys
from dapo_jax import training as train

train_step = train.train_step

def signalled(run, records, state, *arguments):
    if state.progress.step == int(os.environ["STEP"]) - 1:
        os.kill(os.getpid(), int(os.environ["SIGNAL"]))
    return train_step(run, records, state, *arguments)

train.train_step = signalled
train.main()
"""


class Started(NamedTuple):
    """A process with the files for its output."""

    process: subprocess.Popen
    out: TextIO
    err: TextIO

    def end(self) -> tuple[int, str, str]:
        """Its exit code, output and errors, once it has ended."""
        texts = []
        for file in (self.out, self.err):
            file.seek(0)
            texts.append(file.read())
        return self.process.returncode, *texts


class Signal(NamedTuple):
    """The signal that a training process receives, and when."""

    number: int
    process: int
    step: int  # the step that it starts to train on


def start(
    workdir, logs, *, processes, devices, second=None, command=("train",), gets: Signal | None = None, **changes
) -> list[Started]:
    """The command in several processes with several devices each; `second`: options that differ in process 1."""
    port, running = free_port(), []
    environment = {
        **os.environ,
        "JAX_NUM_CPU_DEVICES": str(devices),
        "PYTHONPATH": str(CONFIGS.parent),
    }
    for process in range(processes):
        values = {**OPTIONS, "workdir": workdir, **changes, **(second or {} if process == 1 else {})}
        if processes > 1:
            values |= {
                "trainer.coordinator": f"127.0.0.1:{port}",
                "trainer.num_processes": processes,
                "trainer.process_id": process,
            }
        flags = [f"--config.{name}={value}" for name, value in values.items()]
        program = ["-m", f"dapo_jax.{command[0]}"]
        if gets is not None and gets.process == process:
            program = ["-c", SIGNALLED]
            environment |= {"STEP": str(gets.step), "SIGNAL": str(gets.number)}
        outputs = [open(logs / f"{port}.{process}.{name}", "w+") for name in ("out", "err")]  # a pipe may fill up
        popen = subprocess.Popen(
            [sys.executable, *program, "--config", CONFIGS / "tiny.py", *flags, *command[1:]],
            env=environment,
            stdout=outputs[0],
            stderr=outputs[1],
        )
        running.append(Started(popen, *outputs))
    return running


def finish(running: list[Started]) -> list[tuple[int, str, str]]:
    """The exit code, output and errors of each process."""
    try:
        for started in running:
            started.process.wait(LIMIT_S)
    finally:
        for started in running:
            started.process.kill()
    return [started.end() for started in running]


def trained(*arguments, **named) -> list[str]:
    """The output of each process of a run that succeeds."""
    ended = finish(start(*arguments, **named))
    assert [code for code, _, _ in ended] == [0] * len(ended), [errors[-3000:] for _, _, errors in ended]
    return [output for _, output, _ in ended]


def words(output: str) -> str:
    """A process's output without Gloo's greetings, which its threads may interleave."""
    greeting = r"\[Gloo\]|Rank|is|connected|to|peer|ranks\.?|Expected|number|of"
    return re.sub(rf"{greeting}|[\d\s:]", "", output)


def policy(workdir, step: int = 4) -> dict:
    """The parameters of the checkpoint of `step`, read by this one process onto a mesh of its own."""
    config = small_config(workdir)
    arch, _ = read_model(config)
    mesh = make_mesh(-1, 1, 2)
    shape = build_actor(actor_settings(config, arch, mesh), mesh).trainable.state_shape.params
    checkpoints = Checkpoints(checkpoint_dir(config), max_to_keep=2)
    try:
        return jax.device_get(checkpoints.restore_policy(step, shape))
    finally:
        checkpoints.close()


def files(workdir: Path) -> set[str]:
    names = (str(path.relative_to(workdir)) for path in workdir.rglob("*") if path.is_file())
    return {name for name in names if not name.startswith(("checkpoints", "events."))}


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def two(tmp_path_factory, logs):
    """The workdir of two processes with four devices each, and their output."""
    workdir = tmp_path_factory.mktemp("two")
    return workdir, trained(workdir, logs, processes=2, devices=4, **{"mesh.fsdp": 2, "mesh.tensor": 2})


def test_two_processes_train_as_one(tmp_path, logs):
    """Two steps, so that the second samples what the first has learnt; the one process has eight devices.

    The teacher is the first policy, so it has something to say in the second step.
    """
    changes = {**OPTIONS, "trainer.total_training_steps": 2, "trainer.val_before_train": False, "trainer.test_freq": -1}
    changes |= {"algorithm.distillation.path": "random", "algorithm.distillation.form": "top_k"}
    changes |= {"algorithm.distillation.top_k": 6}
    outputs = trained(tmp_path / "two", logs, processes=2, devices=1, **changes)
    assert "step 2/2" in outputs[0] and words(outputs[1]) == ""
    models = train(small_config(tmp_path / "one", **changes))
    one, two = tmp_path / "one", tmp_path / "two"
    rows, expected = ([without_shares(row) for row in rows_without_clock(folder)] for folder in (two, one))
    assert rows == [pytest.approx(row, abs=1e-5, rel=1e-4) for row in expected] and len(rows) == 2
    assert rows[1]["distillation/reverse_kl"] > 1e-3
    assert [samples(two, step) for step in (1, 2)] == [samples(one, step) for step in (1, 2)]
    assert_same_policy(models, policy(two, step=2), 1e-5)


@pytest.mark.slow
def test_processes_train_alike(tmp_path, logs, two):
    workdir, outputs = two
    expected, params = rows_without_clock(workdir), policy(workdir)
    assert "held-out accuracy after" in outputs[0] and "step 4/4" in outputs[0]
    assert words(outputs[0]) and words(outputs[1]) == ""
    assert len(list(workdir.glob(EVENTS))) == 1
    mesh = {"mesh.fsdp": 2, "mesh.tensor": 2}
    for name, changes in (
        ("1x8", {"processes": 1, "devices": 8, **mesh}),
        ("1x1", {"processes": 1, "devices": 1}),
        ("divided", {"processes": 2, "devices": 4, **mesh, **WITHOUT_TENSOR}),
    ):
        other = tmp_path / name
        trained(other, logs, **changes)
        assert files(other) == files(workdir)
        for step in range(1, 5):
            assert samples(other, step) == samples(workdir, step)
        rows = rows_without_clock(other)
        assert len(rows) == len(expected) == 5
        for row, wanted in zip(rows, expected, strict=True):
            if name != "1x8":  # the batch is divided as on one device
                row, wanted = without_shares(row), without_shares(wanted)
            assert row == pytest.approx(wanted, abs=1e-5, rel=1e-4)
        for found, wanted in zip(jax.tree.leaves(policy(other)), jax.tree.leaves(params), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)


def samples(workdir: Path, step: int) -> list[dict]:
    return [json.loads(line) for line in open(workdir / "samples" / f"step_{step:06d}.jsonl")]


def without_shares(row: dict) -> dict:
    return {name: value for name, value in row.items() if not name.startswith("global_seqlen/")}


@pytest.mark.slow
def test_processes_measure_checkpoints_alike(tmp_path, logs, two):
    where = {"processes": 2, "devices": 4, "mesh.fsdp": 2, "mesh.tensor": 2}
    outputs = trained(two[0], logs, command=("evaluate", "--all-steps", "--output", tmp_path / "out"), **where)
    assert "task set" in outputs[0] and words(outputs[1]) == ""
    results = json.loads((tmp_path / "out" / "metrics.json").read_text())
    rows = {row["step"]: row for row in rows_without_clock(two[0])}
    assert {2, 4} <= {result["step"] for result in results}
    for result in results:
        found = {name.replace("bench/", "eval/"): value for name, value in result["metrics"].items()}
        wanted = {name: value for name, value in rows[result["step"]].items() if name.startswith("eval/")}
        assert wanted and found == wanted | {"time/bench": found["time/bench"]}
    lines = (tmp_path / "out" / "generations.jsonl").read_text().splitlines()
    assert len(lines) == len(results) * 4 * 4, "one process writes them"


@pytest.mark.slow
def test_processes_export_what_one_exports(tmp_path, logs, two):
    sharded = {"mesh.fsdp": 4, "mesh.tensor": 2}
    command = ("export", "--dtype", "float32", "--output", tmp_path / "two")
    outputs = trained(two[0], logs, processes=2, devices=4, command=command, **sharded)
    assert "after step 4" in outputs[0] and words(outputs[1]) == ""
    assert export(small_config(two[0]), tmp_path / "one", dtype="float32") == 4
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert "model.safetensors" in names and names == sorted(path.name for path in (tmp_path / "two").iterdir())
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name


@pytest.mark.slow
def test_a_run_resumes_in_another_number_of_processes_on_another_mesh(tmp_path, logs, two):
    shutil.copytree(two[0], tmp_path / "run")
    more = {"trainer.total_training_steps": 5, "mesh.fsdp": 4, "mesh.tensor": 2, **WITHOUT_TENSOR}
    trained(tmp_path / "run", logs, processes=1, devices=8, **more)
    rows = rows_without_clock(tmp_path / "run")
    assert rows[:5] == rows_without_clock(two[0]) and [row["step"] for row in rows] == [*range(6)]
    assert rows[5]["rollout_corr/logprob_abs_diff"] < 1e-4 and rows[5]["actor/skipped_updates"] == 0


@pytest.mark.slow
def test_a_process_that_is_killed_ends_the_others_and_a_restart_resumes(tmp_path, logs, two):
    mesh = {"mesh.fsdp": 2, "mesh.tensor": 2}
    where = {"processes": 2, "devices": 4, **mesh, "trainer.heartbeat_timeout_s": 10}
    for killed in (1, 0):
        ended = finish(start(tmp_path, logs, gets=Signal(signal.SIGKILL, process=killed, step=4), **where))
        (code, _, errors) = ended[1 - killed]
        assert ended[killed][0] == -signal.SIGKILL and code != 0
        if killed == 1:
            assert re.search(r"tasks are unhealthy \(stopped sending heartbeats\):\s*1\b", errors), errors[-2000:]
        else:
            assert re.search("the leader|coordination service", errors), errors[-2000:]
    trained(tmp_path, logs, **where)
    assert rows_without_clock(tmp_path) == rows_without_clock(two[0])
    for found, wanted in zip(jax.tree.leaves(policy(tmp_path)), jax.tree.leaves(policy(two[0])), strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_at_the_same_step(tmp_path, logs, two):
    where = {
        "processes": 2,
        "devices": 4,
        "mesh.fsdp": 2,
        "mesh.tensor": 2,
        "trainer.save_freq": -1,
        "trainer.stop_patience_s": 600.0,
    }
    ended = finish(start(tmp_path, logs, gets=Signal(signal.SIGTERM, process=1, step=2), **where))
    assert [code for code, _, _ in ended] == [0, 0], [errors[-2000:] for _, _, errors in ended]
    assert "stopped by a signal to another process after step" in ended[0][2]
    (saved,) = (int(path.name) for path in (tmp_path / "checkpoints").iterdir())
    assert 1 <= saved < 4
    trained(tmp_path, logs, **where)
    assert rows_without_clock(tmp_path) == rows_without_clock(two[0])


@pytest.mark.slow
def test_processes_that_were_not_started_alike_are_refused(tmp_path, logs):
    ended = finish(start(tmp_path, logs, processes=2, devices=1, second={"seed": 7}))
    for code, _, errors in ended:
        assert code == 2 and "seed must be the same in all processes: it is 0 in process 0 and 7 in process 1" in errors
    assert files(tmp_path) == {"lock.1", "train.log"}
