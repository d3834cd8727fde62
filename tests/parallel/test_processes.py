"""Laws: no batch and no update depends on the number of processes; if one ends, no other keeps waiting.

The processes of the short tests are forked together (forked.py) and run at the same time.
"""

import functools
import json
import re
import shutil
import signal
from pathlib import Path

import jax
import numpy as np
import pytest
from forked import COMMAND, Process, assert_succeeded, options, run_together, together
from ports import free_port
from shapes import SMALL
from small_families import changes_of, with_tokenizer
from small_run import rows_without_clock, small_config, unsure_function

from dapo_jax.config.derived import checkpoint_dir
from dapo_jax.export.export import export
from dapo_jax.learner.actor import build_actor
from dapo_jax.monitor.kept_batches import read_batch
from dapo_jax.monitor.tensorboard import EVENTS
from dapo_jax.parallel import processes
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.parallel.processes import gather
from dapo_jax.run.base_models import read_model
from dapo_jax.run.checkpoint import Checkpoints
from dapo_jax.run.settings import actor_settings
from dapo_jax.tools.replay import replay

EPS = {"actor.optim.eps": 1e-6}  # Adam divides by what is smaller: with 1e-8 it makes steps of rounding errors
ONE_STEP = {
    **SMALL,
    **EPS,
    "rollout.n": 8,
    "trainer.total_training_steps": 1,
    "trainer.keep_batches": "1",
    "data.arithmetic.num_heldout": 0,
    "trainer.test_freq": 10,
}

# A command that does something once the processes have joined.
JOINED = """
import sys, time
import jax
from dapo_jax.command.command_line import command
from dapo_jax.errors import InputError
from dapo_jax.parallel import endings, processes
from dapo_jax.training.loop import train

processes.QUIET_S, processes.JOIN_TIMEOUT_S, endings.TOGETHER_S = 100, 200, {together_s}
with command(sys.argv) as (config, recipe):
    {body}
"""
TRAINS = "train(config, recipe=recipe); time.sleep(2 * (jax.process_index() == 0)); raise InputError('no such file')"
DIFFERS = """print("processes", jax.process_count())
    try:
        train(config, recipe=recipe)
    finally:
        time.sleep(2 * jax.process_index())
"""
GATHERS = "[processes.gather('x' * length) for length in (1, 5000, 1)]"
FAILS = "processes.gather('x'); 1 / 0"
ALONE = """
import sys
import jax
from dapo_jax.command.command_line import command

with command(sys.argv):
    print("processes", jax.process_count())
"""
# Waits for the others only as long as JAX needs to find the address of process 0.
AT_ONCE = """
import threading, time, types
from dapo_jax.parallel import processes

class Joined(threading.Event):
    def wait(self, timeout=None):
        while processes.waiting_for() == "JAX looks for process 0":
            time.sleep(0.05)
        return False

processes.threading = types.SimpleNamespace(Event=Joined, Thread=threading.Thread)
processes.JOIN_TIMEOUT_S = 2
"""


def of_slurm(process: int, port: int) -> dict[str, str]:
    names = {"JOB_ID": 7, "STEP_NODELIST": "localhost", "NTASKS": 2, "PROCID": process, "LOCALID": 0}
    return {f"SLURM_{name}": str(value) for name, value in names.items()} | {"JAX_COORDINATOR_PORT": str(port)}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Of processes that could not go on: their folder, their ports, and how they ended, by what they were to do."""
    folder, ports = tmp_path_factory.mktemp("ended"), [free_port() for _ in range(6)]
    one_device = {"JAX_NUM_CPU_DEVICES": "1"}
    started = {"train": [], "differ": [], "one fails": [], "lost": []}
    for process in range(2):
        given = {**ONE_STEP, "workdir": folder / "train", "mesh.fsdp": 2, **together(ports[0], process)}
        code = JOINED.format(body=TRAINS, together_s=100)
        started["train"].append(Process(code, options(given), one_device))
        given, by_slurm = {"workdir": folder / "differ", "seed": 7 * process}, of_slurm(process, ports[1])
        code = JOINED.format(body=DIFFERS, together_s=100)
        started["differ"].append(Process(code, options(given), {**one_device, **by_slurm}))
        code = JOINED.format(body=(GATHERS, FAILS)[process], together_s=1)
        started["one fails"].append(Process(code, options(together(ports[2], process)), one_device))
        started["lost"].append(Process(AT_ONCE + ALONE, options(together(ports[3 + process], process))))
    started["lost"].append(Process(AT_ONCE + ALONE, options({}), of_slurm(1, ports[5])))
    alone = {**ONE_STEP, "workdir": folder / "alone"}
    started["alone"] = [Process(COMMAND.format("train"), options(alone), one_device)]
    cuda = options({"workdir": folder / "cuda"}), {"JAX_PLATFORMS": "cuda"}
    started["cuda"] = [Process(COMMAND.format("train"), *cuda)]
    ends = iter(run_together([process for group in started.values() for process in group]))
    return folder, ports, {name: [next(ends) for _ in group] for name, group in started.items()}


def test_two_processes_train_as_one(ended):
    """Parameters are divided over the devices of both; the batch that is kept has the groups of both."""
    two, one = ended[0] / "train", ended[0] / "alone"
    outputs = [found.output for found in ended[2]["train"]]
    assert ended[2]["alone"][0].code == 0 and "step 1/1" in outputs[0] and words(outputs[1]) == "", ended[2]
    assert_alike(one, two, steps=1)
    assert rows_without_clock(two)[1]["actor/num_updates"] == 2
    again = replay(two, 1, from_batch=True)
    assert again.equal and again.counts["kept groups"] == SMALL["data.train_batch_size"], str(again)
    alone, shared = (read_batch(folder, 1) for folder in (one, two))
    assert alone.keys() == shared.keys()
    assert all(np.allclose(alone[name], shared[name], atol=1e-5, equal_nan=True) for name in alone)


def test_when_all_fail_each_tells_its_reason(ended):
    """If process 0 ended first, JAX would abort the other, whichever is slower: here the first, below the second."""
    for process, (code, _, errors) in enumerate(ended[2]["train"]):
        assert (code, errors.splitlines()[-1]) == (2, f"dapo_jax: no such file (process {process})"), errors


def test_tasks_of_slurm_join_and_those_that_were_not_started_alike_are_refused(ended):
    for process, (code, output, errors) in enumerate(ended[2]["differ"]):
        assert code == 2 and "processes 2" in output.splitlines(), errors
        last = errors.splitlines()[-1]
        assert "seed must be the same in all processes: it is 0 in process 0 and 7 in process 1" in last
        assert last.endswith(f"(process {process})")
    assert files(ended[0] / "differ") == {"lock.1", "train.log"}


def test_one_that_fails_is_named_by_the_others(ended):
    """On one CPU, fetching from a failed gather raises ValueError, which is not wrong input."""
    (code, _, errors), (other_code, _, other_errors) = ended[2]["one fails"]
    assert (code, other_code) == (1, 1) and "ZeroDivisionError" in other_errors, errors + other_errors
    assert "JAX cannot continue: " in errors and "this is a bug" not in errors
    assert errors.splitlines()[-1] == "dapo_jax: process 1 has failed: division by zero"


def test_processes_that_do_not_find_each_other_end_with_the_addresses(ended):
    _, ports, ends = ended
    waits = (
        f"process 0 waits at 127.0.0.1:{ports[3]} for the others",
        f"process 1 does not reach process 0 at 127.0.0.1:{ports[4]} (",
        f"process 1 does not reach process 0 at localhost:{ports[5]} (",
    )
    for (code, output, errors), wait in zip(ends["lost"], waits, strict=True):
        assert code == 2 and output == "", errors
        first, last = errors.splitlines()
        assert first.startswith(f"dapo_jax: waiting up to 2 s: {wait}")
        assert last.startswith(f"dapo_jax: cannot join the other processes of this run: after 2 s, {wait}")
        assert last.endswith("trainer.num_processes=1 starts this process alone")
    assert "2 processes: SLURM_NTASKS=2, SLURM_PROCID=1, SLURM_STEP_NODELIST=localhost" in ends["lost"][2].errors


def assert_says_what_is_missing(ended):
    assert ended.code == 2 and "Traceback" not in ended.errors
    last = ended.errors.splitlines()[-1]
    assert last.startswith("dapo_jax: JAX_PLATFORMS=cuda cannot be used: ") and "dapo_jax[cuda" in last
    assert "without JAX_PLATFORMS, JAX finds " in last


def test_a_command_says_which_device_is_missing(ended):
    assert_says_what_is_missing(ended[2]["cuda"][0])
    assert not (ended[0] / "cuda").exists()


@pytest.mark.full
def test_the_preflight_says_which_device_is_missing(tmp_path):
    given = [*options({"workdir": tmp_path / "run"}), "--topology", "tpu"]
    process = Process(COMMAND.format("preflight"), given, {"JAX_PLATFORMS": "cuda"})
    assert_says_what_is_missing(*run_together([process]))


def test_messages_of_any_length_take_few_programs(monkeypatch):
    """JAX compiles and caches a gather for each length that is sent, 1.4 MB each."""
    lengths = set()

    def process_allgather(array):
        lengths.add(array.shape)
        return np.stack([array, array])

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(processes.multihost_utils, "process_allgather", process_allgather)
    for length in (*range(0, 3000, 7), 4094, 4095, 4096, 1_000_000):
        assert gather("é" * length) == ["é" * length] * 2
    assert gather(None) == [None] * 2 and len(lengths) < 12


# Run outputs.


def words(output: str) -> str:
    """A process's output without Gloo's greetings, which its threads may interleave."""
    greeting = r"\[Gloo\]|Rank|is|connected|to|peer|ranks\.?|Expected|number|of"
    return re.sub(rf"{greeting}|[\d\s:]", "", output)


def policy(workdir: Path, step: int = 4) -> dict:
    """The parameters of the checkpoint of `step`, read by this one process onto a mesh of its own."""
    config = small_config(workdir)
    arch, _ = read_model(config.model)
    mesh = make_mesh(-1, 1, 2)
    shape = build_actor(actor_settings(config, arch, mesh), mesh).trainable.state_shape.params
    checkpoints = Checkpoints(checkpoint_dir(config.workdir, config.trainer), config.trainer)
    try:
        return jax.device_get(checkpoints.restore_policy(step, shape)[0])
    finally:
        checkpoints.close()


def assert_close(found: dict, expected: dict) -> None:
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-5), found, expected)


def files(workdir: Path) -> set[str]:
    names = (str(path.relative_to(workdir)) for path in workdir.rglob("*") if path.is_file())
    return {name for name in names if not name.startswith(("checkpoints", "events."))}


def samples(workdir: Path, step: int) -> list[dict]:
    return [json.loads(line) for line in open(workdir / "samples" / f"step_{step:06d}.jsonl")]


def without_shares(rows: list[dict]) -> list[dict]:
    return [{name: value for name, value in row.items() if not name.startswith("global_seqlen/")} for row in rows]


# Whole runs of two processes with two devices each, that fsdp or tensor divides across them.

MESH = {"mesh.fsdp": 2, "mesh.tensor": 2}
WITHOUT_TENSOR = {"mesh.train_tensor": 1, "actor.ppo_micro_batch_size_per_device": 2}  # in training
# The training command, which receives a signal when it starts to train on a step.
SIGNALLED = """
import os
from dapo_jax.training import loop as training

train_step = training.train_step

def signalled(run, records, state, *arguments):
    if state.progress.step == {step} - 1:
        os.kill(os.getpid(), {signal})
    return train_step(run, records, state, *arguments)

training.train_step = signalled
training.main()
"""


def started(workdir, *, number=2, devices=2, command="train", more=(), signals=None, **changes) -> list[Process]:
    """A command in several processes; `signals`: the code of a process that receives one."""
    port, environment = free_port(), {"JAX_NUM_CPU_DEVICES": str(devices)}
    given = {**SMALL, **EPS, "workdir": workdir, **changes}
    return [
        Process(
            (signals or {}).get(process, COMMAND.format(command)),
            [*options({**given, **(together(port, process, number) if number > 1 else {})}), *more],
            environment,
        )
        for process in range(number)
    ]


def trained(*arguments, also=(), **named) -> list[str]:
    """The output of each process of a command that succeeds; `also`: processes that run at the same time."""
    ends = run_together([*started(*arguments, **named), *also])
    assert_succeeded(ends)
    return [one.output for one in ends]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The workdir of two processes, and their output."""
    workdir = tmp_path_factory.mktemp("two")
    return workdir, trained(workdir, **MESH)


def assert_alike(workdir, other, steps, *, first=1, divided_alike=False):
    """`first`: the step that first trains; `divided_alike`: both divide each batch over as many devices."""
    assert files(other) == files(workdir)
    for step in range(first, steps + 1):
        assert samples(other, step) == samples(workdir, step)
    rows, expected = map(rows_without_clock, (other, workdir))
    if not divided_alike:
        rows, expected = map(without_shares, (rows, expected))
    assert rows == [pytest.approx(row, abs=1e-5, rel=1e-4) for row in expected] and len(rows) == steps + 1
    assert_close(policy(other, step=steps), policy(workdir, step=steps))


@pytest.mark.full
def test_two_processes_exchange_the_tokens_of_experts(tmp_path):
    own = {"trainer.total_training_steps": 1, "actor.optim.eps": 1e-4, "data.max_response_length": 8, "seed": 1}
    given = ONE_STEP | changes_of(with_tokenizer("qwen3_moe", tmp_path), **own)
    del given["algorithm.filter_groups.max_num_gen_batches"]
    port, one_device = free_port(), {"JAX_NUM_CPU_DEVICES": "1"}
    exchange = [{"workdir": tmp_path / "two", "mesh.expert": 2, **together(port, process)} for process in range(2)]
    runs = [options(given | run) for run in (*exchange, {"workdir": tmp_path / "alone"})]
    ends = run_together([Process(COMMAND.format("train"), run, one_device) for run in runs])
    assert [end.code for end in ends] == [0, 0, 0], ends
    assert samples(tmp_path / "two", 1) == samples(tmp_path / "alone", 1)
    two, one = (without_shares(rows_without_clock(tmp_path / name)) for name in ("two", "alone"))
    assert two == [pytest.approx(row, abs=1e-5, rel=1e-4) for row in one]


@pytest.mark.parametrize(
    ("number", "devices", "changes"),
    [
        (1, 1, {}),
        (1, 4, MESH),
        (2, 4, {**MESH, **WITHOUT_TENSOR}),
    ],
    ids=["one device", "one process", "divided"],
)
@pytest.mark.full
def test_processes_train_alike(tmp_path, two, number, devices, changes):
    workdir, outputs = two
    assert "held-out accuracy after" in outputs[0] and "step 4/4" in outputs[0]
    assert words(outputs[0]) and words(outputs[1]) == "" and len(list(workdir.glob(EVENTS))) == 1
    trained(tmp_path, number=number, devices=devices, **changes)
    assert_alike(workdir, tmp_path, steps=4, divided_alike=devices == 4 and number == 1)


FILTER = "algorithm.filter_groups"
CARRIED = {f"{FILTER}.leftover": "carry", f"{FILTER}.leftover_max_staleness": 3}
GROWING = {  # fewer slots than responses, of several chunks
    f"{FILTER}.leftover": "carry",
    "data.max_response_length": 80,
    "rollout.decode_chunk_length": 8,
    "rollout.max_num_seqs": 16,
}
TAUGHT = {  # by the first policy, which has something to say from the second step on
    "algorithm.distillation.path": "random",
    "algorithm.distillation.form": "top_k",
    "algorithm.distillation.top_k": 6,
}


@pytest.mark.parametrize(
    "changes",  # what happens to leftover groups
    [
        {f"{FILTER}.leftover": "requeue", f"{FILTER}.backfill": "stream", **TAUGHT},
        pytest.param({**CARRIED, "rollout.segment_length": 2, "data.max_response_length": 6}, marks=pytest.mark.full),
        pytest.param(GROWING, marks=pytest.mark.full),
    ],
    ids=["a queue with a teacher", "segments", "few slots"],
)
@pytest.mark.slow
def test_processes_sample_and_keep_alike(tmp_path, changes):
    changes = {**changes, "trainer.total_training_steps": 3, "data.arithmetic.num_heldout": 0}
    changes |= {"trainer.test_freq": 10, "trainer.save_freq": -1}
    unsure = "rollout.segment_length" not in changes  # with it, one of 9,216 parameters differs by 2e-5
    if unsure:
        changes["reward.function"] = unsure_function(tmp_path)
    trained(tmp_path / "two", also=started(tmp_path / "one", number=1, devices=1, **changes), **MESH, **changes)
    assert_alike(tmp_path / "two", tmp_path / "one", 3, first=3 if "rollout.segment_length" in changes else 1)
    rows = rows_without_clock(tmp_path / "two")
    assert (sum(row.get("reward/num_missing", 0) for row in rows) > 0) == unsure
    if TAUGHT.items() <= changes.items():
        assert rows[2]["distillation/reverse_kl"] > 1e-3


@pytest.mark.slow
def test_processes_measure_checkpoints_alike(tmp_path, two):
    more = ("--all-steps", "--output", str(tmp_path))
    outputs = trained(two[0], command="evaluate", more=more, **MESH)
    assert "task set" in outputs[0] and words(outputs[1]) == ""
    results = json.loads((tmp_path / "metrics.json").read_text())
    rows = {row["step"]: row for row in rows_without_clock(two[0])}
    assert {2, 4} <= {result["step"] for result in results}
    for result in results:
        found = {name.replace("bench/", "eval/"): value for name, value in result["metrics"].items()}
        wanted = {name: value for name, value in rows[result["step"]].items() if name.startswith("eval/")}
        assert wanted and found == wanted | {"time/bench": found["time/bench"]}
    lines = (tmp_path / "generations.jsonl").read_text().splitlines()
    assert len(lines) == len(results) * 4 * 4, "one process writes them"


@pytest.mark.slow
def test_processes_export_what_one_exports(tmp_path, two):
    more = ("--dtype", "float32", "--output", str(tmp_path / "two"))
    outputs = trained(two[0], command="export", more=more, **{"mesh.fsdp": 4})
    assert "after step 4" in outputs[0] and words(outputs[1]) == ""
    assert export(small_config(two[0]), tmp_path / "one", dtype="float32") == 4
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert "model.safetensors" in names and names == sorted(path.name for path in (tmp_path / "two").iterdir())
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name


@pytest.mark.slow
def test_a_run_resumes_in_another_number_of_processes_on_another_mesh(tmp_path, two):
    shutil.copytree(two[0], tmp_path / "run")
    more = {"trainer.total_training_steps": 5, "mesh.fsdp": 4, "mesh.tensor": 2, **WITHOUT_TENSOR}
    trained(tmp_path / "run", number=1, devices=8, **more)
    rows = rows_without_clock(tmp_path / "run")
    assert rows[:5] == rows_without_clock(two[0]) and [row["step"] for row in rows] == [*range(6)]
    assert rows[5]["rollout_corr/logprob_abs_diff"] < 1e-4 and rows[5]["actor/skipped_updates"] == 0


@pytest.mark.parametrize(
    ("killed", "message"),
    [
        pytest.param(1, r"tasks are unhealthy \(stopped sending heartbeats\):\s*1\b", marks=pytest.mark.slow),
        pytest.param(0, "the leader|coordination service", marks=pytest.mark.full),
    ],
    ids=["another", "first"],
)
def test_a_process_that_is_killed_ends_the_others_and_a_restart_resumes(tmp_path, two, killed, message):
    where = {**MESH, "trainer.heartbeat_timeout_s": 10}
    code = SIGNALLED.format(step=4, signal=int(signal.SIGKILL))
    ends = run_together(started(tmp_path, signals={killed: code}, **where))
    other = ends[1 - killed]
    assert ends[killed].code == -signal.SIGKILL and other.code != 0
    assert re.search(message, other.errors), other.errors[-2000:]
    trained(tmp_path, **where)
    assert rows_without_clock(tmp_path) == rows_without_clock(two[0])
    jax.tree.map(np.testing.assert_array_equal, policy(tmp_path), policy(two[0]))


@pytest.mark.full
def test_a_signal_to_one_process_stops_all_at_the_same_step(tmp_path, two):
    where = {**MESH, "trainer.save_freq": -1, "trainer.stop_patience_s": 600.0}
    code = SIGNALLED.format(step=2, signal=int(signal.SIGTERM))
    ends = run_together(started(tmp_path, signals={1: code}, **where))
    assert_succeeded(ends)
    assert "stopped by a signal to another process after step" in ends[0].errors
    (saved,) = (int(path.name) for path in (tmp_path / "checkpoints").iterdir())
    assert 1 <= saved < 4
    trained(tmp_path, **where)
    assert rows_without_clock(tmp_path) == rows_without_clock(two[0])


def test_on_several_cpu_devices_a_program_ends_before_the_next_begins(monkeypatch):
    """Of 26 runs of two at a time on six devices of two cores, six stopped for good in an update."""
    waited = []
    monkeypatch.setattr(processes.jax, "block_until_ready", waited.append)
    for devices in (1, 6):
        monkeypatch.setattr(processes.jax, "device_count", lambda devices=devices: devices)
        processes.settle(devices)
    assert waited == [6]
