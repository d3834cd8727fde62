"""The worked example of docs/data.md runs as it stands there."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import dapo_jax
from dapo_jax.command.command_line import read_config
from dapo_jax.command.validation import validate
from dapo_jax.data.prompt_files import read_prompt_files
from dapo_jax.rewards.verifiers import VERIFIERS, load_verifier, verifier_for

ROOT = Path(dapo_jax.__file__).parents[1]
GUIDE = (ROOT / "docs/data.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", GUIDE, re.M | re.S)


@pytest.fixture
def example(tmp_path):
    for name, text in zip(("countdown.py", "test_countdown.py", "form.py"), blocks("python"), strict=True):
        (tmp_path / name).write_text(text)
    return tmp_path


def test_the_reward_function_passes_its_own_tests(example):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_countdown.py"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=example, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "8 passed" in done.stdout, done.stdout + done.stderr


def test_its_rows_are_read_and_its_command_is_valid(example, monkeypatch):
    subprocess.run([sys.executable, "countdown.py"], cwd=example, check=True)
    rows = read_prompt_files([str(example / f"countdown_{split}.jsonl") for split in ("train", "heldout")])
    assert len(rows) == 550 and rows[0].extra_info["index"] == 0
    [command] = [text for text in blocks("bash") if "countdown.py" in text]
    arguments = re.findall(r"(?:[^\s\"\\]|\"[^\"]*\")+", command.split("dapo_jax.train")[1])
    monkeypatch.chdir(ROOT)
    config = read_config(["train", *(argument.replace('"', "") for argument in arguments)])
    validate(config)
    assert config.reward.function == "countdown.score" and config.data.train_files == ("countdown_train.jsonl",)


def test_several_rewards(example, monkeypatch):
    [command] = [text for text in blocks("bash") if "reward.functions" in text]
    monkeypatch.chdir(ROOT)
    config = read_config(["train", *shlex.split(command.replace("\\\n", ""))[3:]])
    validate(config)
    monkeypatch.chdir(example)
    score = load_verifier(config.reward.functions)
    for text, shape in ((r"\boxed{7} #### 7", 1.0), (r"\boxed{6} or \boxed{7} #### 7", 0.0), ("#### 7", 0.0)):
        verdict = score("openai/gsm8k", text, "7", {})
        assert (verdict["score"], verdict["acc"], verdict["format"]) == (1.0 + 0.2 * shape, 1.0, shape)


def test_the_row_of_the_guide_is_a_row(tmp_path):
    [row] = blocks("json")
    file = tmp_path / "rows.jsonl"
    file.write_text(" ".join(row.split()))
    [read] = read_prompt_files([str(file)])
    verdict = VERIFIERS[verifier_for(read.data_source)].score(read.data_source, "It is 7.", read.ground_truth, {})
    assert verdict["acc"] and read.extra_info == {"index": 0}


def test_every_verifier_has_its_line():
    named = set(re.findall(r"^\| `(\w+)` \|", GUIDE, re.M))
    assert set(VERIFIERS) - {"auto", "none"} <= named
