"""The scripts that set up an environment or call one command often, with a command that stands in for Python."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from scripts.stand_ins import call, calls_of, stand_in

from dapo_jax.command.command_line import read_config
from dapo_jax.command.validation import validate

ROOT = Path(__file__).parents[2]

# Stands in for Python, uv and virtualenv: makes an environment whose Python is itself, says which compilers JAX wants
# and installs nothing.
PYTHON = """
case "$* " in
  *"venv "* | "--quiet --python "*)
    [[ "$*" == "-m venv"* ]] || mkdir "${@: -1}" || exit
    mkdir -p "${@: -1}/bin" && cp "$0" "${@: -1}/bin/python"
    [[ -n "${NO_VENV:-}" && "$1" == -m ]] && exit 1
    cd "${@: -1}" && echo "export VIRTUAL_ENV='$PWD' PATH='$PWD/bin:$PATH'" >bin/activate ;;
  "- ") echo "0.10.2 cpython-311 libtpu==0.0.42.*" ;;
  *"--target "*) [[ -z "${NO_NETWORK:-}" ]] && while [[ $1 != --target ]]; do shift; done && mkdir -p "$2" ;;
esac
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """Runs one of our scripts in a folder of its own, and returns what Python was asked to do, or the errors."""
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    shutil.copy(ROOT / "setup.py", tmp_path)
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    tools = tmp_path / "tools"
    variables = {"PYTHON": str(stand_in(tools / "python", PYTHON)), "DAPO_JAX_CACHE": str(tmp_path / "cache")}

    def run(script, *arguments, code=0, **more):
        done = call(tmp_path / script, *arguments, folder=tmp_path, tools=tools, **variables | more)
        assert done.returncode == code, done.stderr
        calls = [line.partition(" ")[2] for line in calls_of(tools)]
        return done.stderr if code else calls

    return run


def test_the_quickstart_makes_an_environment_once_and_trains(checkout, tmp_path):
    python = tmp_path / ".venv/bin/python"  # the first of its files; venv was killed while it installed pip
    python.parent.mkdir(parents=True)
    shutil.copy(tmp_path / "tools/python", python)
    version, venv, install, train = checkout("scripts/quickstart.sh")
    assert version.startswith("<-c> ") and venv == "<-m> <venv> <.venv>"
    assert install.startswith("<-m> <pip> <install> ") and install.endswith(" <.>")
    assert train == "<-m> <dapo_jax.train> <--config> <quickstart>"
    assert checkout("scripts/quickstart.sh", "--model", "a b", "--config.seed=1") == [
        f"{train} <--config.model.path=a b> <--config.seed=1>"
    ]


@pytest.mark.parametrize("program", ["uv", "virtualenv"])
def test_without_the_module_venv_another_program_makes_the_environment(checkout, tmp_path, program):
    python = shutil.copy(tmp_path / "tools/python", tmp_path / "tools" / program).with_name("python")
    _, venv, other, install, *_ = checkout("scripts/quickstart.sh", NO_VENV="1")
    assert venv == "<-m> <venv> <.venv>" and install.startswith("<-m> <pip> <install> ")
    begin = "<venv> <--quiet> <--seed>" if program == "uv" else "<--quiet>"
    assert other == f"{begin} <--python> <{python}> <.venv>"


def test_without_any_such_program_the_message_says_what_to_install(checkout, tmp_path):
    for name in ("bash", "dirname", "sed", "rm", "env", "mkdir", "cp"):
        (tmp_path / "tools" / name).symlink_to(shutil.which(name))
    message = checkout("scripts/quickstart.sh", code=2, NO_VENV="1", PATH=str(tmp_path / "tools"))
    assert "cannot make a virtual environment: install its venv module (apt-get install python3-venv), or uv" in message


@pytest.fixture
def preflights(checkout):
    """The words of each command that makes a report of the preflight."""
    words = [one[1:-1].split("> <") for one in checkout("scripts/docs/preflight_reports.sh")]
    return [one for one in words if one[:2] == ["-m", "dapo_jax.preflight"]]


def after(option, words):
    return words[words.index(option) + 1]


def test_every_recipe_that_names_an_accelerator_has_a_report(checkout, preflights):
    assert len(preflights) == 26
    for words in preflights:
        report = json.loads((ROOT / after("--json", words)).read_text())
        assert report["fits"] and report["topology"] == after("--topology", words)
    named = [path for path in (ROOT / "configs").glob("*.py") if re.search("H100|A100|L4|v5[ep]", path.read_text())]
    assert len(named) == 13 and {f"configs/{path.name}" for path in named} <= {
        after("--config", one) for one in preflights
    }
    asked, *chosen, pages = checkout("scripts/docs/preflight_reports.sh", "7b_v5e", "7b_v5p")
    assert asked == "<->" and len(chosen) == 2 and pages == "<scripts/docs/write_preflight_doc.py>"


@pytest.mark.slow
def test_the_reports_of_the_preflight_are_of_valid_configs(preflights, monkeypatch):
    monkeypatch.chdir(ROOT)
    for words in preflights:
        options = [word for word in words if word.startswith("--config.")]
        validate(read_config(["preflight", "--config", after("--config", words), *options]))


def test_compilers_of_accelerators_are_installed_once(checkout, tmp_path):
    message = checkout("scripts/test_accelerators.sh", code=2, NO_NETWORK="1")
    assert "cannot install JAX's compilers: the first time needs a network, and 2 GB in" in message
    asked, install, tests = checkout("scripts/test_accelerators.sh", "-k", "critic")
    assert asked == "<->" and "<--no-deps>" in install
    packages = "jax-cuda13-plugin==0.10.2> <jax-cuda13-pjrt==0.10.2> <nvidia-cudnn-cu13==9.28.1.4> <libtpu==0.0.42.*"
    assert install.endswith(f" <{packages}>")
    assert tests.startswith("<-m> <pytest> <tests/accelerators> ") and tests.endswith(" <-k> <critic>")
    assert len(os.listdir(tmp_path / "cache/accelerators")) == 1
    assert checkout("scripts/test_accelerators.sh") == ["<->", tests.removesuffix(" <-k> <critic>")]
