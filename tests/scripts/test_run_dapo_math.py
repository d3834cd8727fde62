"""All stages of scripts/launch/run_dapo_math.sh, with a command that stands in for Python and with the real one."""

import json
import os
import re
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ports import free_port
from scripts.stand_ins import calls_of, stand_in, start
from waiting import LIMIT_S, wait_until

from dapo_jax.command.command_line import read_config
from dapo_jax.export.export import export

SCRIPTS = Path(__file__).parents[2] / "scripts"
TINY = str(SCRIPTS.parent / "tests/small_recipe.py")
HOST_NUMBERS = ("HOST", "TPU_WORKER_ID", "JOB_COMPLETION_INDEX", "SLURM_PROCID")
VARIABLES = (*HOST_NUMBERS, "CONFIG", "OUTPUT", "TOPOLOGY", "DAPO_FILE", "AIME_FILE")

# Takes the place of Python: writes the file of its last argument, and leaves reading reports to the real one.
PYTHON = f"""
[[ $1 == -c ]] && exec {sys.executable} "$@"
file="${{@: -1}}"
case $2 in
  dapo_jax.preflight) echo "{{\\"fits\\": ${{FITS:-true}}}}" >"$file" ;;
  dapo_jax.train) eval "${{TRAINING:-}}" ;;
  dapo_jax.export) mkdir -p "$file" && echo "$JAX_PLATFORMS" >"$file/config.json" ;;
esac
"""

# The real Python kills all that its host runs when it imports, opens, makes or renames to what KILLED_AT names.
KILLER = """
import os, signal, sys

def kill(event, arguments):
    if event in ("import", "open", "os.mkdir", "os.rename"):
        if str(arguments[event == "os.rename"]).endswith(os.environ["KILLED_AT"]):
            os.killpg(0, signal.SIGKILL)

sys.addaudithook(kill)
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A folder with our scripts, in which a command stands in for Python."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    shutil.copytree(SCRIPTS, tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    stand_in(tmp_path / "interpreter", PYTHON)
    return tmp_path


def start_script(checkout, *options, **variables):
    variables = {"PYTHON": str(checkout / "interpreter"), **variables}
    script = checkout / "scripts/launch/run_dapo_math.sh"
    return start(script, *options, folder=checkout, tools=checkout, **variables)


def run_script(checkout, *options, **variables):
    """Exit code, errors and calls of Python, without those that read a report."""
    process = start_script(checkout, *options, **variables)
    errors = process.communicate(timeout=LIMIT_S)[1]
    return process.returncode, errors, [line for line in calls_of(checkout) if not line.startswith("interpreter <-c>")]


def test_the_stages_follow_each_other_with_the_same_options(checkout):
    given = ["--config.model.path=models/a b", "--config.seed=3"]
    code, errors, (dapo, aime, preflight, *rest) = run_script(checkout, *given, DAPO_FILE="published 17k.parquet")
    assert code == 0, errors
    options = "<--config> <dapo_qwen2.5_7b_math> <--config.model.path=models/a b> <--config.seed=3>"
    alone = "<--config.mesh.fsdp=1> <--config.mesh.tensor=1> <--config.trainer.num_processes=1>"
    data = "interpreter <-m> <dapo_jax.tools.data>"
    assert [dapo, aime] == [f"{data} <dapo-math-17k> <--input> <published 17k.parquet>", f"{data} <aime-2024>"]
    assert preflight.startswith(f"interpreter <-m> <dapo_jax.preflight> {options} <--topology> <gpu> <--json> ")
    train, evaluate, export = (
        f"interpreter <-m> <dapo_jax.{name}> {options}" for name in ("train", "evaluate", "export")
    )
    kept = f"{evaluate} <--all-steps> <--if-missing> <--output> <build/dapo_math-evaluation>"
    assert rest == [train, kept, f"{export} {alone} <--output> <build/dapo_math>"]
    assert (checkout / "build/dapo_math/config.json").read_text() == "cpu\n"
    code, _, calls = run_script(checkout, *given)
    assert code == 0 and calls[3:] == [train, kept], "the model exists; evaluate has nothing to do"


def stages(calls):
    return [line.split("dapo_jax.")[1].partition(">")[0] for line in calls if re.search(r"dapo_jax\.(?!tools)", line)]


def test_what_does_not_fit_is_not_trained_and_training_that_fails_is_not_exported(checkout):
    code, errors, calls = run_script(checkout, FITS="false")
    assert (code, stages(calls)) == (2, ["preflight"]) and "does not fit" in errors
    code, _, calls = run_script(checkout, TOPOLOGY="none", TRAINING="exit 3")
    assert (code, stages(calls)) == (3, ["train"])


def test_one_host_of_a_pod_exports_and_all_measure(checkout):
    for name in HOST_NUMBERS:
        code, _, calls = run_script(checkout, TOPOLOGY="none", **{name: "1"})
        assert (code, stages(calls)) == (0, ["train", "evaluate"]), name
    for name in HOST_NUMBERS:
        output = f"build/{name}"
        code, _, calls = run_script(checkout, TOPOLOGY="none", OUTPUT=output, **{name: "0"})
        assert (code, stages(calls)) == (0, ["train", "evaluate", "export"]), name


def test_a_signal_reaches_training_and_its_status_is_kept(checkout):
    training = "trap 'exit 7' TERM; touch training; while :; do sleep 0.05; done"
    process = start_script(checkout, TRAINING=training)
    wait_until((checkout / "training").exists)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == 7 and stages(calls_of(checkout)) == ["preflight", "train"]


OPTIONS = [
    f"--config.{option}"
    for option in """
    data.task=files data.train_files=('data/dapo-math-17k.parquet',) data.val_files=('data/aime-2024.parquet',)
    data.train_batch_size=2 reward.function=arithmetic reward.num_workers=1 rollout.n=2 evaluate.n=1
    actor.ppo_mini_batch_size=2 actor.ppo_micro_batch_size_per_device=2 algorithm.filter_groups.enable=False
    model.random.num_layers=1 trainer.total_training_steps=2 trainer.save_freq=1 trainer.test_freq=-1
    trainer.val_before_train=False trainer.heartbeat_timeout_s=60
    """.split()
]


def two_hosts(checkout, killed_at, topology="none"):
    """The exit codes of the script on two hosts that share the checkout, and the errors of the first."""
    variables = {"PYTHON": sys.executable, "CONFIG": TINY, "TOPOLOGY": topology, "KILLED_AT": killed_at}
    variables["PYTHONPATH"] = os.pathsep.join([str(checkout / "killer"), str(SCRIPTS.parent)])
    variables |= {f"{name}_FILE": str(checkout / f"{name}.parquet") for name in ("DAPO", "AIME")}
    processes = [f"--config.trainer.coordinator=127.0.0.1:{free_port()}", "--config.trainer.num_processes=2"]
    hosts = [
        start_script(checkout, *OPTIONS, *processes, f"--config.trainer.process_id={host}", HOST=str(host), **variables)
        for host in range(2)
    ]
    try:
        errors = hosts[0].communicate(timeout=LIMIT_S)[1]
        if hosts[0].returncode:  # what starts the hosts of a pod ends the others
            os.killpg(hosts[1].pid, signal.SIGKILL)
        hosts[1].communicate(timeout=LIMIT_S)
    finally:
        for host in hosts:
            with suppress(ProcessLookupError):
                os.killpg(host.pid, signal.SIGKILL)
    return [host.returncode for host in hosts], errors


@pytest.mark.full
def test_two_hosts_that_are_killed_in_each_stage_go_on(checkout, monkeypatch):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")
    (checkout / "killer").mkdir()
    (checkout / "killer/sitecustomize.py").write_text(KILLER)
    for name, count in (("DAPO", 6), ("AIME", 2)):  # sums in the schema of DAPO-Math-17k and AIME-2024
        prompts = [[{"role": "user", "content": f"{number} + 1 ="}] for number in range(count)]
        answers = [{"ground_truth": str(number + 1)} for number in range(count)]
        pq.write_table(pa.table({"prompt": prompts, "reward_model": answers}), checkout / f"{name}.parquet")
    output, evaluation = checkout / "build/dapo_math", checkout / "build/dapo_math-evaluation"
    stages = {"data/aime-2024.parquet": "none", "preflight.report": "cpu", "checkpoints/2": "cpu"}
    for killed_at, topology in (stages | {"metrics.json": "none", "model.safetensors": "none"}).items():
        codes, errors = two_hosts(checkout, killed_at, topology)
        assert codes[0] == -signal.SIGKILL, (killed_at, errors)
    for _ in range(2):
        codes, errors = two_hosts(checkout, "nowhere")
        assert codes == [0, 0], errors
        assert sorted(output.parent.iterdir()) == [output, evaluation]
        assert [result["step"] for result in json.loads((evaluation / "metrics.json").read_text())] == [1, 2]
    assert len((evaluation / "generations.jsonl").read_text().splitlines()) == 2 * 2
    here = [f"--config.workdir={checkout / 'runs/tiny'}", "--config.actor.use_dynamic_bsz=True"]
    export(read_config(["export", "--config", TINY, *OPTIONS, *here]), checkout / "expected")
    for path in (checkout / "expected").iterdir():
        assert path.read_bytes() == (output / path.name).read_bytes(), path.name
