"""The worked example of docs/rewards.md runs as written."""

import importlib
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

import dapo_jax
from dapo_jax.command.command_line import read_config
from dapo_jax.command.validation import validate
from dapo_jax.data.prompt_files import read_prompt_files
from dapo_jax.rewards.verifiers import VERIFIERS, load_verifier, verifier_for

ROOT = Path(dapo_jax.__file__).parents[1]
GUIDE = (ROOT / "docs/rewards.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", GUIDE, re.M | re.S)


def config_of(text: str):
    """The config of the training command with this text, which is valid."""
    [command] = [block for block in blocks("bash") if text in block]
    [command] = [line for line in command.replace("\\\n", " ").splitlines() if "dapo_jax.train" in line]
    config = read_config(["train", *shlex.split(command)[3:]])
    validate(config)
    return config


@pytest.fixture
def example(tmp_path, monkeypatch):
    for name, text in zip(("countdown.py", "test_countdown.py", "form.py"), blocks("python"), strict=True):
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in ("countdown", "test_countdown"):
        sys.modules.pop(name, None)


def test_the_reward_function_passes_its_own_tests(example):
    tests = importlib.import_module("test_countdown")
    [parametrized] = tests.test_answers.pytestmark
    for case in parametrized.args[1]:
        tests.test_answers(*case)
    tests.test_in_a_worker()


def test_its_rows_are_read_and_its_command_is_valid(example, monkeypatch):
    runpy.run_path("countdown.py", run_name="__main__")
    rows = read_prompt_files([f"countdown_{split}.jsonl" for split in ("train", "heldout")])
    assert len(rows) == 550 and rows[0].extra_info["index"] == 0
    monkeypatch.chdir(ROOT)
    config = config_of("countdown.py")
    assert config.reward.function == "countdown.score" and config.data.train_files == ("countdown_train.jsonl",)


def test_several_rewards(example, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = config_of("form.py")
    monkeypatch.chdir(example)
    score = load_verifier(config.reward.functions)
    for text, shape in ((r"\boxed{7} #### 7", 1.0), (r"\boxed{6} or \boxed{7} #### 7", 0.0), ("#### 7", 0.0)):
        verdict = score("openai/gsm8k", text, "7", {})
        assert (verdict["score"], verdict["acc"], verdict["format"]) == (1.0 + 0.2 * shape, 1.0, shape)


def test_the_row_of_the_guide_is_a_row(tmp_path):
    [row] = re.findall(r"^```json\n(.*?)^```$", (ROOT / "docs/data.md").read_text(), re.M | re.S)
    file = tmp_path / "rows.jsonl"
    file.write_text(" ".join(row.split()))
    [read] = read_prompt_files([str(file)])
    verdict = VERIFIERS[verifier_for(read.data_source)].score(read.data_source, "It is 7.", read.ground_truth, {})
    assert verdict["acc"] and read.extra_info == {"index": 0}


def test_every_verifier_has_its_line():
    named = set(re.findall(r"^\| `(\w+)` \|", GUIDE, re.M))
    assert set(VERIFIERS) - {"auto", "none"} <= named
