"""The scripts that are Python: their arithmetic and what they print."""

import argparse
import contextlib
import importlib.util
import io
import json
import math
import os
import re
import runpy
import shutil
import subprocess
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import benchmark_update
import contenders
import monitor_filter_groups
import numpy as np
import plan_dynamic_sampling
import pytest

from dapo_jax.command import interrupts
from dapo_jax.config.sections import FilterGroupsConfig
from dapo_jax.monitor.filter_log import log_round, rule_words
from dapo_jax.monitor.workdir import open_workdir

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "scripts"
COMMANDS = [
    path
    for path in sorted(SCRIPTS.rglob("*"))
    if (path.suffix == ".py" and "__main__" in path.read_text())
    or (path.suffix == ".sh" and path.read_text().startswith("#!"))
]


def run(script: Path, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A script as a user calls it, in a folder that is its home too; Python in this process, which has imported JAX."""
    environment = {
        "PYTHONPATH": str(ROOT),
        "HOME": str(folder),
        "DAPO_JAX_CACHE": str(folder / "c"),
        "VIRTUAL_ENV": "",
        "PYTHONDONTWRITEBYTECODE": "1",
        "MPLCONFIGDIR": str(folder.parent),
    }
    command = [str(script), *arguments]
    if script.suffix == ".sh":
        return subprocess.run(
            [str(shutil.which("bash")), *command],
            cwd=folder,
            capture_output=True,
            text=True,
            env=os.environ | environment,
        )
    code, out, err = 0, io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(sys, "argv", command),
        mock.patch.object(sys, "path", [str(script.parent), *sys.path]),
        mock.patch.object(interrupts, "end_at_once"),
        contextlib.chdir(folder),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
            print(ended.code if isinstance(ended.code, str) else "", end="", file=sys.stderr)
        except BaseException:
            traceback.print_exc()
            code = 1
    return subprocess.CompletedProcess(command, code, out.getvalue(), err.getvalue())


def written_files() -> dict[str, int]:
    """Every file of the checkout but caches, with when it was written."""
    found = {}
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if not name.startswith((".", "__pycache__", "build"))]
        found |= {path: os.stat(path).st_mtime_ns for path in (f"{folder}/{name}" for name in files)}
    return found


@pytest.mark.parametrize("script", COMMANDS, ids=lambda path: path.name)
def test_help_prints_help_and_does_nothing_else(script, tmp_path):
    before = written_files()
    done = run(script, "--help", folder=tmp_path)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert script.name in done.stdout or script.stem in done.stdout, "it says how it is called"
    assert not list(tmp_path.iterdir()) and written_files() == before


@pytest.mark.parametrize("name", ["plot_run", "monitor_filter_groups"])
def test_a_run_is_named_by_its_workdir_or_a_file_and_a_wrong_path_is_one_line(name, tmp_path):
    run_folder, empty = tmp_path / "run", tmp_path / "empty"
    empty.mkdir()
    run_folder.mkdir()
    row = {"step": 1, "dynamic_sampling/num_gen_batches": 1, "dynamic_sampling/num_evaluated_prompts": 4}
    (run_folder / "metrics.jsonl").write_text(json.dumps(row) + '\n{"step": 2, "cut')
    (tmp_path / "other.jsonl").write_text("no JSON\n")
    options = ["--output", str(tmp_path / "picture.png")] if name == "plot_run" else []
    script = SCRIPTS / f"{name}.py"
    for wrong in (tmp_path / "nowhere", empty, tmp_path / "other.jsonl", empty / "metrics.jsonl"):
        done = run(script, str(wrong), *options, folder=tmp_path)
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
        assert done.stderr.startswith(f"{name}.py: {wrong}") and "give" in done.stderr
    if name == "monitor_filter_groups":
        of_file, of_folder = (run(script, str(run_folder / part), folder=tmp_path) for part in ("metrics.jsonl", ""))
        assert of_file.stdout == of_folder.stdout and "training steps                 1" in of_file.stdout
        (run_folder / "metrics.jsonl").unlink()
        (run_folder / "train.log").write_text("Generated batch 1, 8 prompts\nFiltered (std=0): 6 (75.0%)\n")
        assert "generation rounds              1" in run(script, str(run_folder), folder=tmp_path).stdout
    elif importlib.util.find_spec("matplotlib") is not None:
        for given in (run_folder, run_folder / "metrics.jsonl"):
            assert run(script, str(given), *options, folder=tmp_path).returncode == 0
            (tmp_path / "picture.png").unlink()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("plan_dynamic_sampling", ["--accuracies", "nowhere"]),
        ("benchmarks/benchmark_dynamic_sampling", ["--config", "nowhere.py"]),
        ("benchmarks/soak", ["--config", "nowhere.py"]),
        ("comparisons/compare_trl", ["--trl", "nowhere", "--config.nonsense=1"]),
        ("comparisons/run_ablation", ["--config.model.path=nowhere", "x"]),
        ("data/prepare_gsm8k", ["nowhere.parquet"]),
    ],
)
def test_no_script_ends_in_a_traceback_for_a_wrong_path(name, arguments, tmp_path):
    done = run(SCRIPTS / f"{name}.py", *arguments, folder=tmp_path)
    assert done.returncode in (1, 2) and "Traceback" not in done.stderr and done.stderr


def test_a_group_is_mixed_unless_all_samples_agree():
    np.testing.assert_allclose(plan_dynamic_sampling.keep_probability(np.array([0.0, 0.5, 1.0]), 4), [0, 1 - 2 / 16, 0])


def test_expected_rounds_are_those_of_a_simulation():
    found = plan_dynamic_sampling.plan(0.3, target=20, gen_batch_size=16)
    rng = np.random.default_rng(0)
    rounds = []
    for _ in range(4000):
        kept = np.cumsum(rng.binomial(16, 0.3, size=30))
        rounds.append(1 + int(np.argmax(kept >= 20)))
    assert found.rounds == pytest.approx(np.mean(rounds), abs=0.05)
    assert np.mean(np.array(rounds) <= found.limit) >= 0.998 and np.mean(np.array(rounds) <= found.limit - 1) < 0.9995
    assert found.generated_per_trained == pytest.approx(found.rounds * 16 / 20)
    assert plan_dynamic_sampling.plan(1.0, target=20, gen_batch_size=16).rounds == 2
    assert math.isinf(plan_dynamic_sampling.plan(0.0, target=20, gen_batch_size=16).rounds)


def test_the_plan_is_printed(capsys):
    plan_dynamic_sampling.main(["--accuracy", "0.5", "--n", "2", "--train-batch-size", "64"])
    out = capsys.readouterr().out
    assert "keep rate                      0.5000" in out and "2.00, if no kept group is lost" in out


def test_log_and_metrics_are_summed_up_alike(tmp_path):
    (tmp_path / "train.log").write_text(
        "Generated batch 1, 8 prompts, 64 trajectories\nFiltered (std=0): 6 (75.0%)\nKept (std>0): 2 prompts (25.0%)\n"
        "Generated batch 2, 8 prompts, 64 trajectories\nFiltered (std=0): 2 (25.0%)\nKept (std>0): 6 prompts (75.0%)\n"
    )
    row = {
        "step": 1,
        "train/filter_rate": 0.5,
        "dynamic_sampling/num_evaluated_prompts": 16,
        "dynamic_sampling/num_gen_batches": 2,
        "dynamic_sampling/filtered_all_correct": 3,
        "dynamic_sampling/filtered_all_wrong": 5,
    }
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 0}) + "\n" + json.dumps(row) + "\n")
    from_log = monitor_filter_groups.log_summary(monitor_filter_groups.read_log(tmp_path / "train.log"))
    from_metrics = monitor_filter_groups.steps_summary(monitor_filter_groups.read_steps(tmp_path / "metrics.jsonl"))
    assert from_log[1:3] == from_metrics[1:3]
    assert "(2.00 per step)" in from_log[1] and "50.0%" in from_log[2] and "8 (4.0 per round)" in from_log[3]
    assert monitor_filter_groups.log_summary({"batches": []}) == ["no generation round in the log: is the filter on?"]


@pytest.mark.parametrize("rule", ["std", "mean_range", "mixed"])
def test_the_log_of_every_rule_is_read(tmp_path, rule):
    words = rule_words(FilterGroupsConfig(rule=rule))
    with open_workdir(tmp_path, detailed=False):
        for number, kept in enumerate((2, 6), start=1):
            log_round(
                step=1,
                round_number=number,
                num_prompts=8,
                num_samples=4,
                metric="acc",
                words=words,
                num_kept=kept,
                mean_std=0.1,
                num_accumulated=8,
                target=8,
            )
    found = monitor_filter_groups.read_log(tmp_path / "train.log")
    assert found == {"batches": [1, 2], "filter_rates": [0.75, 0.25], "kept_prompts": [2, 6]}


def test_variants_of_ours_are_named_options_of_their_types():
    given = ["a", "b=actor.share_prompts=False,actor.optim.lr=1e-6,model.dtype=x"]
    assert benchmark_update.variants(argparse.Namespace(ours=given)) == {
        "dapo_jax a": {},
        "dapo_jax b": {"actor.share_prompts": False, "actor.optim.lr": 1e-6, "model.dtype": "x"},
    }


def test_a_foreign_loop_takes_a_step_only_when_it_is_asked_to_and_its_error_is_seen():
    turns_of, steps = contenders.Turns, []

    def loop(turns):
        for number in range(2):
            turns.wait_for_turn()
            steps.append(number)
        raise OSError("the end")

    turns = turns_of(loop)
    assert steps == []
    turns.take()
    assert steps == [0]
    with pytest.raises(OSError, match="the end"):
        turns.take()


def test_a_benchmark_gives_the_seconds_of_the_first_call_as_they_were():
    """Less the median of the others it was below zero where nothing compiles, or the machine slowed down."""
    slowed = contenders.Result(SimpleNamespace(name="hf float32"), 10.0, [12.0, 14.0], tokens=26, peak=0.0)
    row = slowed.row(slowed, None)
    assert (row["first s"], row["seconds"], row["tokens/s"]) == (10.0, [12.0, 14.0], 2.0)
    for path in (ROOT / "docs" / "results").glob("*.json"):
        rows = json.loads(path.read_text()).get("rows", [])
        assert all(row["first s"] > 0 for row in rows if "first s" in row)


def named_paths(text: str) -> set[str]:
    """Every path below scripts/ or tests/scripts/ that the text names, up to the first character that varies."""
    return set(re.findall(r"\b(?:tests/)?scripts/[\w./-]*\w", text))


def test_every_script_that_a_file_names_exists():
    """But in docs/results/*.json, which say how a result was made at its time."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    named = {}
    for name in filter(None, listed.split("\0")):
        path = ROOT / name
        if path.is_file() and not path.match("docs/results/*.json"):
            named[name] = named_paths(path.read_text(errors="ignore"))
    wrong = [(name, path) for name, paths in named.items() for path in paths if not list(ROOT.glob(f"{path}*"))]
    assert wrong == [] and len(set().union(*named.values())) > 40
