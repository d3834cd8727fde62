"""All stages of scripts/launch/run_dapo_math.sh, with a command that stands in for Python."""

import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
from scripts.stand_ins import calls_of, stand_in, start
from waiting import LIMIT_S, wait_until

SCRIPTS = Path(__file__).parents[2] / "scripts"
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
