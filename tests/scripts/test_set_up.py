"""The scripts that set up an environment or call one command often, with an interpreter that notes what it is asked."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dapo_jax.command.command_line import read_config
from dapo_jax.command.validation import validate

ROOT = Path(__file__).parents[2]

# Stands in for Python, uv and virtualenv: notes its arguments, makes an environment whose Python is itself, says which
# compilers JAX wants and installs nothing.
INTERPRETER = """
import json, os, shutil, sys
from pathlib import Path

with open(os.environ["CALLS"], "a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")
if "venv" in sys.argv[1:3] or sys.argv[0].endswith("virtualenv"):
    bin = Path(sys.argv[-1], "bin")
    bin.mkdir(parents=True, exist_ok="-m" in sys.argv)  # the others refuse a folder
    shutil.copy(sys.argv[0], bin / "python")
    if "NO_VENV" in os.environ and "-m" in sys.argv:
        sys.exit(1)
    (bin / "activate").write_text(f"export VIRTUAL_ENV='{bin.parent.absolute()}' PATH='{bin.absolute()}':$PATH")
if sys.argv[1:] == ["-"]:
    print("0.10.2 cpython-311 libtpu==0.0.42.*")
if "--target" in sys.argv:
    if "NO_NETWORK" in os.environ:
        sys.exit(1)
    Path(sys.argv[sys.argv.index("--target") + 1]).mkdir(parents=True)
"""


@pytest.fixture
def checkout(tmp_path):
    """Runs one of our scripts in a folder of its own, and returns what Python was asked to do."""
    shutil.copy(ROOT / "setup.py", tmp_path)
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    python = tmp_path / "tools/python"
    python.parent.mkdir()
    python.write_text(f"#!{sys.executable}\n{INTERPRETER}")
    python.chmod(0o755)

    def run(script, *arguments, code=0, **variables):
        calls = tmp_path / "calls.jsonl"
        calls.unlink(missing_ok=True)
        env = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
        env |= {"PYTHON": str(python), "CALLS": str(calls), "PATH": f"{python.parent}{os.pathsep}{env['PATH']}"}
        env |= {"DAPO_JAX_CACHE": str(tmp_path / "cache"), **variables}
        done = subprocess.run(["bash", str(tmp_path / script), *arguments], env=env, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        if code:
            return done.stderr
        return [json.loads(line) for line in calls.read_text().splitlines()]

    return run


def test_the_quickstart_makes_an_environment_once_and_trains(checkout):
    version, venv, install, train = checkout("scripts/quickstart.sh")
    assert version[0] == "-c" and venv == ["-m", "venv", ".venv"]
    assert install[:3] == ["-m", "pip", "install"] and install[-1] == "."
    assert train == ["-m", "dapo_jax.train", "--config", "quickstart"]
    [train] = checkout("scripts/quickstart.sh", "--model", "a b.gguf", "--config.seed=1")
    assert train[3:] == ["quickstart", "--config.model.path=a b.gguf", "--config.seed=1"]


def test_an_environment_that_was_made_by_half_is_made_again(checkout, tmp_path):
    python = tmp_path / ".venv/bin/python"  # the first of its files; venv was killed while it installed pip
    python.parent.mkdir(parents=True)
    shutil.copy(tmp_path / "tools/python", python)
    assert ["-m", "venv", ".venv"] in checkout("scripts/quickstart.sh")


@pytest.mark.parametrize("program", ["uv", "virtualenv"])
def test_without_the_module_venv_another_program_makes_the_environment(checkout, tmp_path, program):
    shutil.copy(tmp_path / "tools/python", tmp_path / "tools" / program)
    _, venv, other, install, *_ = checkout("scripts/quickstart.sh", NO_VENV="1")
    assert venv == ["-m", "venv", ".venv"] and install[:3] == ["-m", "pip", "install"]
    begin = ["venv", "--quiet", "--seed"] if program == "uv" else ["--quiet"]
    assert other == [*begin, "--python", str(tmp_path / "tools/python"), ".venv"]


def test_without_any_such_program_the_message_says_what_to_install(checkout, tmp_path):
    for name in ("bash", "dirname", "sed", "rm", "env"):
        (tmp_path / "tools" / name).symlink_to(shutil.which(name))
    message = checkout("scripts/quickstart.sh", code=2, NO_VENV="1", PATH=str(tmp_path / "tools"))
    assert "cannot make a virtual environment: install its venv module (apt-get install python3-venv), or uv" in message


def test_the_reports_of_the_preflight_are_of_valid_configs(checkout, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    calls = [call for call in checkout("scripts/docs/preflight_reports.sh") if call[:2] == ["-m", "dapo_jax.preflight"]]
    assert len(calls) == 26
    for call in calls:
        options = [option for option in call if option.startswith("--config.")]
        validate(read_config(["preflight", "--config", call[call.index("--config") + 1], *options]))
        report = json.loads((ROOT / call[call.index("--json") + 1]).read_text())
        assert report["fits"] and report["topology"] == call[call.index("--topology") + 1]
    asked, *chosen, pages = checkout("scripts/docs/preflight_reports.sh", "7b_v5e", "7b_v5p")
    assert asked == ["-"] and len(chosen) == 2 and pages == ["scripts/docs/write_preflight_doc.py"]


def test_every_recipe_that_names_an_accelerator_has_a_report():
    reports = (ROOT / "scripts/docs/preflight_reports.sh").read_text()
    recipes = (ROOT / "configs").glob("*.py")
    named = [path.name for path in recipes if re.search("H100|A100|L4|v5[ep]", path.read_text())]
    assert len(named) == 10 and all(f"--config configs/{name}" in reports for name in named)


def test_compilers_of_accelerators_are_installed_once(checkout, tmp_path):
    *_, asked, install, tests = checkout("scripts/test_accelerators.sh", "-k", "critic")
    assert asked == ["-"] and "--no-deps" in install
    assert install[-4:] == [
        "jax-cuda13-plugin==0.10.2",
        "jax-cuda13-pjrt==0.10.2",
        "nvidia-cudnn-cu13<10",
        "libtpu==0.0.42.*",
    ]
    assert tests[:3] == ["-m", "pytest", "tests/accelerators"] and tests[-2:] == ["-k", "critic"]
    assert len(list((tmp_path / "cache/accelerators").iterdir())) == 1
    assert checkout("scripts/test_accelerators.sh") == [["-"], tests[:-2]]


def test_compilers_that_cannot_be_installed_are_said_to_be_missing(checkout):
    message = checkout("scripts/test_accelerators.sh", code=2, NO_NETWORK="1")
    assert "cannot install JAX's compilers: the first time needs a network, and 2 GB in" in message
