"""The whole way of scripts/run_dapo_math.sh, with an interpreter that notes what it is asked for."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
CONFIG = "configs/dapo_qwen2.5_7b_math.py"

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
        time.sleep(60)
    sys.exit(int(os.environ.get("STATUS", 0)))
elif command == "dapo_jax.evaluate":
    Path(wanted["--output"]).mkdir(parents=True)
elif command == "dapo_jax.export":
    Path(wanted["--output"]).mkdir(parents=True)
    Path(wanted["--output"], "config.json").write_text(os.environ["JAX_PLATFORMS"])
else:
    Path(wanted["--output"]).parent.mkdir(exist_ok=True)
    Path(wanted["--output"]).touch()
"""


class Checkout:
    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "scripts").mkdir()
        shutil.copy(SCRIPTS / "run_dapo_math.sh", root / "scripts")
        interpreter = root / "interpreter"
        interpreter.write_text(f"#!{sys.executable}\n{INTERPRETER}")
        interpreter.chmod(0o755)

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        known = ("TPU_WORKER_ID", "JOB_COMPLETION_INDEX", "SLURM_NODEID", "HOST", "CONFIG", "OUTPUT", "TOPOLOGY")
        env = {name: value for name, value in os.environ.items() if name not in known}
        env |= {"PYTHON": str(self.root / "interpreter"), **variables}
        command = ["bash", str(self.root / "scripts/run_dapo_math.sh"), *arguments]
        return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)

    def run(self, *arguments: str, **variables: str) -> tuple[int, str]:
        process = self.start(*arguments, **variables)
        error = process.communicate(timeout=60)[1]
        return process.returncode, error

    def calls(self) -> list[list[str]]:
        file = self.root / "calls.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


def test_the_stages_follow_each_other_with_the_same_options(checkout):
    options = ["--config.model.path=models/a b", "--config.seed=3"]
    assert checkout.run(*options, DAPO_FILE="published 17k.parquet")[0] == 0
    dapo, aime, preflight, train, export, evaluate = checkout.calls()
    assert dapo == ["scripts/prepare_math_dapo.py", "published 17k.parquet", "--output", "data/dapo-math-17k.parquet"]
    assert aime == ["scripts/prepare_aime.py", "--download", "--output", "data/aime-2024.parquet"]
    start = ["--config", CONFIG, *options]
    assert preflight[:-1] == ["-m", "dapo_jax.preflight", *start, "--topology", "gpu", "--quick", "--json"]
    assert train == ["-m", "dapo_jax.train", *start]
    alone = ["--config.mesh.fsdp=1", "--config.mesh.tensor=1", "--config.trainer.num_processes=1"]
    assert export == ["-m", "dapo_jax.export", *start, *alone, "--output", "build/dapo_math"]
    assert (checkout.root / "build/dapo_math/config.json").read_text() == "cpu"
    assert evaluate == ["-m", "dapo_jax.evaluate", *start, "--all-steps", "--output", "build/dapo_math-evaluation"]


def test_the_same_command_again_only_goes_on_training(checkout):
    assert checkout.run()[0] == checkout.run()[0] == 0
    assert [call[1] for call in checkout.calls()[6:]] == ["dapo_jax.preflight", "dapo_jax.train"]


def test_what_does_not_fit_is_not_trained(checkout):
    (checkout.root / "too_large").touch()
    status, error = checkout.run()
    assert status == 2 and "does not fit" in error
    assert checkout.calls()[-1][1] == "dapo_jax.preflight"


def test_training_that_fails_is_not_exported(checkout):
    assert checkout.run(STATUS="3", TOPOLOGY="none")[0] == 3
    assert [call[1] for call in checkout.calls()[2:]] == ["dapo_jax.train"]


@pytest.mark.parametrize("name", ["HOST", "TPU_WORKER_ID", "JOB_COMPLETION_INDEX", "SLURM_NODEID"])
def test_one_host_of_a_pod_exports_and_all_measure(checkout, name):
    assert checkout.run(**{name: "1"})[0] == 0
    assert [call[1] for call in checkout.calls()[-2:]] == ["dapo_jax.train", "dapo_jax.evaluate"]
    assert checkout.run(**{name: "0"})[0] == 0
    assert checkout.calls()[-1][1] == "dapo_jax.export"


def test_a_signal_reaches_training_and_its_status_is_kept(checkout):
    (checkout.root / "for_ever").touch()
    process = checkout.start()
    for _ in range(1000):
        if (checkout.root / "training").exists():
            break
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 7 and checkout.calls()[-1][1] == "dapo_jax.train"
