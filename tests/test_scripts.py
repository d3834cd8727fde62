"""The scripts that are Python: their arithmetic and what they print."""

import argparse
import contextlib
import io
import json
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


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
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
