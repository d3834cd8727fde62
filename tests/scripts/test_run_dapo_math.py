"""All stages of scripts/launch/run_dapo_math.sh, with an interpreter that notes its arguments and with the real one."""

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ports import free_port
from waiting import LIMIT_S, wait_until

from dapo_jax.command.command_line import read_config
from dapo_jax.export import export

SCRIPTS = Path(__file__).parents[2] / "scripts"
CONFIG, TINY = "configs/dapo_qwen2.5_7b_math.py", str(SCRIPTS.parent / "configs/tiny.py")

# Stands in for Python: notes its arguments, writes the file that it is asked for, and lets the real one read reports.
INTERPRETER = """
import json, os, signal, subprocess, sys, time
from pathlib import Path

arguments = sys.argv[1:]
if arguments[0] == "-c":
    sys.exit(subprocess.run([sys.executable, *arguments]).returncode)
with open("calls.jsonl", "a") as calls:
    calls.write(json.dumps(arguments) + "\\n")
command = arguments[0] if arguments[0] != "-m" else arguments[1]
wanted = dict(zip(arguments, arguments[1:]))
if command == "dapo_jax.preflight":
    Path(wanted["--json"]).write_text(json.dumps({"fits": not os.path.exists("too_large")}))
elif command == "dapo_jax.train":
    if os.path.exists("for_ever"):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
        Path("training").touch()
        time.sleep(600)
    sys.exit(int(os.environ.get("STATUS", 0)))
elif command == "dapo_jax.evaluate":
    Path(wanted["--output"]).mkdir(parents=True, exist_ok=True)
elif command == "dapo_jax.export":
    Path(wanted["--output"]).mkdir(parents=True)
    Path(wanted["--output"], "config.json").write_text(os.environ["JAX_PLATFORMS"])
else:
    Path(wanted["--output"]).parent.mkdir(exist_ok=True)
    Path(wanted["--output"]).touch()
"""


# The real one. It kills all that its host runs in the middle of the stage KILLED_IN, when there is a half of something.
KILLER = """
import importlib, os, signal, sys
from pathlib import Path

def die(*_, **__):
    os.killpg(0, signal.SIGKILL)

def half_a_file(_, path):
    Path(path).write_bytes(b"PAR1")
    die()

def before_step_two(run, records, state, *arguments):
    return die() if state.progress.step == 1 else train_step(run, records, state, *arguments)

def after_some_samples(*arguments):
    write = writer(*arguments)
    return lambda *batch: (write(*batch), die())

arguments = sys.argv[1:]
if arguments[0] == "-c":
    os.execv(sys.executable, [sys.executable, *arguments])
sys.path.insert(0, "scripts/data")
name, *sys.argv = arguments[arguments[0] == "-m":]
sys.argv.insert(0, name)
module = importlib.import_module(name.removeprefix("scripts/data/").removesuffix(".py"))
if hasattr(module, "__path__"):  # a package: its command
    module = importlib.import_module(f"{name}.__main__")
if name == "dapo_jax.train":  # its file holds no more than the call
    module = importlib.import_module("dapo_jax.training")
if name.endswith(os.environ["KILLED_IN"]):
    if name == "scripts/data/prepare_aime.py":
        importlib.import_module("data_preparation").pq.write_table = half_a_file
    elif name == "dapo_jax.preflight":
        importlib.import_module("dapo_jax.preflight.report").compile_program = die
    elif name == "dapo_jax.train":
        train_step, module.train_step = module.train_step, before_step_two
    elif name == "dapo_jax.export":
        module.write_safetensors = die
    elif name == "dapo_jax.evaluate":
        writer, module._writer = module._writer, after_some_samples
module.main()
"""


class Checkout:
    def __init__(self, root: Path, interpreter_code: str) -> None:
        self.root = root
        shutil.copytree(SCRIPTS, root / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
        interpreter = root / "interpreter"
        interpreter.write_text(f"#!{sys.executable}\n{interpreter_code}")
        interpreter.chmod(0o755)

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        known = ("TPU_WORKER_ID", "JOB_COMPLETION_INDEX", "SLURM_PROCID", "HOST", "CONFIG", "OUTPUT", "TOPOLOGY")
        env = {name: value for name, value in os.environ.items() if name not in known}
        env |= {"PYTHON": str(self.root / "interpreter"), **variables}
        command = ["bash", str(self.root / "scripts/launch/run_dapo_math.sh"), *arguments]
        return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True)

    def run(self, *arguments: str, **variables: str) -> tuple[int, str]:
        process = self.start(*arguments, **variables)
        error = process.communicate(timeout=LIMIT_S)[1]
        return process.returncode, error

    def calls(self) -> list[list[str]]:
        file = self.root / "calls.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path, INTERPRETER)


def test_the_stages_follow_each_other_with_the_same_options(checkout):
    options = ["--config.model.path=models/a b", "--config.seed=3"]
    assert checkout.run(*options, DAPO_FILE="published 17k.parquet")[0] == 0
    dapo, aime, preflight, train, evaluate, export = checkout.calls()
    prepare_dapo, prepare_aime = (f"scripts/data/prepare_{name}.py" for name in ("math_dapo", "aime"))
    assert dapo == [prepare_dapo, "published 17k.parquet", "--output", "data/dapo-math-17k.parquet"]
    assert aime == [prepare_aime, "--download", "--output", "data/aime-2024.parquet"]
    start = ["--config", CONFIG, *options]
    assert preflight[:-1] == ["-m", "dapo_jax.preflight", *start, "--topology", "gpu", "--quick", "--json"]
    assert train == ["-m", "dapo_jax.train", *start]
    alone = ["--config.mesh.fsdp=1", "--config.mesh.tensor=1", "--config.trainer.num_processes=1"]
    assert export == ["-m", "dapo_jax.export", *start, *alone, "--output", "build/dapo_math"]
    assert (checkout.root / "build/dapo_math/config.json").read_text() == "cpu"
    where = ["--all-steps", "--if-missing", "--output", "build/dapo_math-evaluation"]
    assert evaluate == ["-m", "dapo_jax.evaluate", *start, *where]


def test_the_same_command_again_prepares_and_exports_nothing(checkout):
    assert checkout.run()[0] == checkout.run()[0] == 0
    again = ["dapo_jax.preflight", "dapo_jax.train", "dapo_jax.evaluate"]  # which is told to do nothing if it is there
    assert [call[1] for call in checkout.calls()[6:]] == again


def test_what_does_not_fit_is_not_trained(checkout):
    (checkout.root / "too_large").touch()
    status, error = checkout.run()
    assert status == 2 and "does not fit" in error
    assert checkout.calls()[-1][1] == "dapo_jax.preflight"


def test_training_that_fails_is_not_exported(checkout):
    assert checkout.run(STATUS="3", TOPOLOGY="none")[0] == 3
    assert [call[1] for call in checkout.calls()[2:]] == ["dapo_jax.train"]


@pytest.mark.parametrize("name", ["HOST", "TPU_WORKER_ID", "JOB_COMPLETION_INDEX", "SLURM_PROCID"])
def test_one_host_of_a_pod_exports_and_all_measure(checkout, name):
    assert checkout.run(**{name: "1"})[0] == 0
    assert [call[1] for call in checkout.calls()[-2:]] == ["dapo_jax.train", "dapo_jax.evaluate"]
    assert checkout.run(**{name: "0"})[0] == 0
    assert [call[1] for call in checkout.calls()[-2:]] == ["dapo_jax.evaluate", "dapo_jax.export"]


def test_a_signal_reaches_training_and_its_status_is_kept(checkout):
    (checkout.root / "for_ever").touch()
    process = checkout.start()
    wait_until((checkout.root / "training").exists)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == 7 and checkout.calls()[-1][1] == "dapo_jax.train"


OPTIONS = {
    "data.task": "files",
    "data.train_files": "('data/dapo-math-17k.parquet',)",
    "data.val_files": "('data/aime-2024.parquet',)",
    "data.train_batch_size": 2,
    "reward.function": "arithmetic",
    "reward.num_workers": 1,
    "rollout.n": 2,
    "evaluate.n": 1,
    "actor.ppo_mini_batch_size": 2,
    "actor.ppo_micro_batch_size_per_device": 2,
    "algorithm.filter_groups.enable": False,
    "model.random.num_layers": 1,
    "trainer.total_training_steps": 2,
    "trainer.save_freq": 1,
    "trainer.test_freq": -1,
    "trainer.val_before_train": False,
    "trainer.heartbeat_timeout_s": 60,
}


def published(path: Path, numbers: range) -> Path:
    """Sums in the schema of DAPO-Math-17k and AIME-2024."""
    rows = [
        {"prompt": [{"role": "user", "content": f"{number} + 1 ="}], "reward_model": {"ground_truth": str(number + 1)}}
        for number in numbers
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def options_of(changes: dict[str, Any]) -> list[str]:
    return ["--config", TINY, *(f"--config.{name}={value}" for name, value in changes.items())]


def two_hosts(checkout: Checkout, killed_in: str, topology: str) -> list[tuple[int, str]]:
    """The exit code and the errors of the script on each of two hosts that share the checkout."""
    options = OPTIONS | {"trainer.coordinator": f"127.0.0.1:{free_port()}", "trainer.num_processes": 2}
    variables = {
        "PYTHONPATH": str(SCRIPTS.parent),
        "CONFIG": TINY,
        "TOPOLOGY": topology,
        "KILLED_IN": killed_in,
        "JAX_NUM_CPU_DEVICES": "1",
        "DAPO_FILE": str(checkout.root / "published_dapo.parquet"),
        "AIME_FILE": str(checkout.root / "published_aime.parquet"),
    }
    hosts = [
        checkout.start(*options_of(options | {"trainer.process_id": host})[2:], HOST=str(host), **variables)
        for host in range(2)
    ]
    try:
        errors = [hosts[0].communicate(timeout=LIMIT_S)[1]]
        if hosts[0].returncode:  # what starts the hosts of a pod ends the others
            os.killpg(hosts[1].pid, signal.SIGKILL)
        errors.append(hosts[1].communicate(timeout=LIMIT_S)[1])
    finally:
        for host in hosts:
            with suppress(ProcessLookupError):
                os.killpg(host.pid, signal.SIGKILL)
    return [(host.returncode, error) for host, error in zip(hosts, errors, strict=True)]


@pytest.mark.slow
def test_two_hosts_that_are_killed_in_each_stage_go_on(tmp_path):
    checkout = Checkout(tmp_path, KILLER)
    published(tmp_path / "published_dapo.parquet", range(6))
    published(tmp_path / "published_aime.parquet", range(2))
    for stage, topology in [
        ("prepare_aime.py", "none"),
        ("preflight", "cpu"),
        ("train", "cpu"),
        ("evaluate", "none"),
        ("export", "none"),
    ]:
        (code, errors), _ = two_hosts(checkout, stage, topology)
        assert code == -signal.SIGKILL, (stage, errors)
    output = tmp_path / "build/dapo_math"
    for _ in range(2):
        ended = two_hosts(checkout, "nowhere", "none")
        assert [code for code, _ in ended] == [0, 0], ended
        assert sorted(path.name for path in output.parent.iterdir()) == ["dapo_math", "dapo_math-evaluation"]
        results = json.loads((tmp_path / "build/dapo_math-evaluation/metrics.json").read_text())
        assert [result["step"] for result in results] == [1, 2]
    assert len((tmp_path / "build/dapo_math-evaluation/generations.jsonl").read_text().splitlines()) == 2 * 2
    here = OPTIONS | {"workdir": tmp_path / "runs/tiny", "actor.use_dynamic_bsz": True}
    export(read_config(["export", *options_of(here)]), tmp_path / "expected")
    for path in (tmp_path / "expected").iterdir():
        assert path.read_bytes() == (output / path.name).read_bytes(), path.name
