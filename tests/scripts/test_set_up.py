"""The scripts that set up an environment or call one command often, with an interpreter that notes what it is asked."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dapo_jax.command_line import read_config
from dapo_jax.validation import validate

ROOT = Path(__file__).parents[2]

# Stands in for Python: notes its arguments, and makes an environment whose Python is itself.
INTERPRETER = """
import json, os, shutil, sys
from pathlib import Path

with open(os.environ["CALLS"], "a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")
if sys.argv[1:3] == ["-m", "venv"]:
    bin = Path(sys.argv[3], "bin")
    bin.mkdir(parents=True)
    shutil.copy(sys.argv[0], bin / "python")
    (bin / "activate").write_text(f"export VIRTUAL_ENV='{bin.parent.absolute()}' PATH='{bin.absolute()}':$PATH")
"""


@pytest.fixture
def checkout(tmp_path):
    """Runs one of our scripts in a folder of its own, and returns what Python was asked to do."""
    for name in ("scripts/quickstart.sh", "scripts/environment.sh", "scripts/preflight_reports.sh", "setup.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / "tools/python"
    python.parent.mkdir()
    python.write_text(f"#!{sys.executable}\n{INTERPRETER}")
    python.chmod(0o755)

    def run(script, *arguments):
        calls = tmp_path / "calls.jsonl"
        calls.unlink(missing_ok=True)
        env = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
        env |= {"PYTHON": str(python), "CALLS": str(calls), "PATH": f"{python.parent}{os.pathsep}{env['PATH']}"}
        done = subprocess.run(["bash", str(tmp_path / script), *arguments], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in calls.read_text().splitlines()]

    return run


def test_the_quickstart_makes_an_environment_once_and_trains(checkout):
    version, venv, install, download, train = checkout("scripts/quickstart.sh")
    assert version[0] == "-c" and venv == ["-m", "venv", ".venv"]
    assert install[:3] == ["-m", "pip", "install"] and install[-1] == ".[quickstart]"
    assert download == ["scripts/download_smollm2.py"]
    assert train == ["-m", "dapo_jax.train", "--config", "configs/quickstart.py"]
    [train] = checkout("scripts/quickstart.sh", "--model", "a b.gguf", "--config.seed=1")
    assert train[3:] == ["configs/quickstart.py", "--config.model.path=a b.gguf", "--config.seed=1"]


def test_the_reports_of_the_preflight_are_of_valid_configs(checkout, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    calls = checkout("scripts/preflight_reports.sh")
    assert len(calls) == 7
    for call in calls:
        assert call[:2] == ["-m", "dapo_jax.preflight"]
        options = [option for option in call if option.startswith("--config.")]
        validate(read_config(["preflight", "--config", call[call.index("--config") + 1], *options]))
        assert (ROOT / call[call.index("--json") + 1]).exists()
    assert len(list((tmp_path / "build/preflight").iterdir())) == 7
    assert len(checkout("scripts/preflight_reports.sh", str(tmp_path / "tables"), "7b_v5e", "7b_v5p")) == 2
