"""The scripts that are Python: their arithmetic and what they print."""

import argparse
import contextlib
import io
import json
import os
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
import pytest

from dapo_jax.command import interrupts

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "scripts"
COMMANDS = [
    path
    for path in sorted(SCRIPTS.rglob("*"))
    if (path.suffix == ".py" and "__main__" in path.read_text())
    or (path.suffix == ".sh" and path.read_text().startswith("#!"))
]


def run(script: Path, *arguments: str, folder: Path) -> tuple[int, str, str]:
    """Exit code and output of a script in a folder that is its home too; Python in this process, which has JAX."""
    environment = {"PYTHONPATH": str(ROOT), "HOME": str(folder), "DAPO_JAX_CACHE": str(folder / "c"), "VIRTUAL_ENV": ""}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", "MPLCONFIGDIR": str(folder.parent)}
    command = [str(script), *arguments]
    if script.suffix == ".sh":
        command, variables = [str(shutil.which("bash")), *command], os.environ | environment
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=variables)
        return done.returncode, done.stdout, done.stderr
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
    return code, out.getvalue(), err.getvalue()


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
    code, out, err = run(script, "--help", folder=tmp_path)
    assert (code, err) == (0, "")
    named = script.stem in ("accelerator_report", "gpu_evidence")
    path = f"scripts/{script.stem}.sh" if named else str(script.relative_to(ROOT))
    assert path in out, "it says how it is called"
    assert not list(tmp_path.iterdir()) and written_files() == before


@pytest.mark.parametrize(
    "command",
    [
        "benchmarks/benchmark_dynamic_sampling --config nowhere.py",
        "benchmarks/soak --config nowhere.py",
        "comparisons/compare_trl --trl nowhere --config.nonsense=1",
        "comparisons/run_ablation --config.model.path=nowhere x",
        "data/prepare_mawps nowhere.parquet",
    ],
)
def test_no_script_ends_in_a_traceback_for_a_wrong_path(command, tmp_path):
    name, *arguments = command.split()
    code, _, err = run(SCRIPTS / f"{name}.py", *arguments, folder=tmp_path)
    assert code in (1, 2) and "Traceback" not in err and err


def test_variants_of_ours_are_named_options_of_their_types():
    given = ["a", "b=actor.share_prompts=False,actor.optim.lr=1e-6,model.dtype=x"]
    assert benchmark_update.variants(argparse.Namespace(ours=given)) == {
        "dapo_jax a": {},
        "dapo_jax b": {"actor.share_prompts": False, "actor.optim.lr": 1e-6, "model.dtype": "x"},
    }


def test_a_foreign_loop_takes_a_step_only_when_it_is_asked_to_and_its_error_is_seen():
    steps = []

    def loop(turns):
        for number in range(2):
            turns.wait_for_turn()
            steps.append(number)
        raise OSError("the end")

    turns = contenders.Turns(loop)
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


def test_every_script_that_a_file_names_exists():
    """But in docs/results/*.json, which say how a result was made at its time."""
    command = ["git", "grep", "-ohE", r"\b(tests/)?scripts/[A-Za-z0-9_./-]*\w", "--", ".", ":!docs/results/*.json"]
    named = set(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split())
    assert [path for path in named if not list(ROOT.glob(f"{path}*"))] == [] and len(named) > 40
