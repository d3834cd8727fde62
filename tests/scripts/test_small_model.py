"""The demonstrations that the small model of the comparisons learns from, and the model as a run reads it."""

import dataclasses
import itertools
import json
import re
import sys
from pathlib import Path

import ablations
import numpy as np
import pytest
import small_model

from dapo_jax.command.command_line import read_config
from dapo_jax.config.sections import DataConfig
from dapo_jax.data.reasoning_gym import reasoning_gym_rows
from dapo_jax.data.tokenizer import load_tokenizer
from dapo_jax.data.worked_sums import sums
from dapo_jax.models.hf_architecture import read_architecture

RECIPE = f"--config={Path(__file__).parents[2] / 'configs/sums.py'}"


def test_no_demonstration_is_of_a_held_out_sum():
    """In any order of its numbers."""
    heldout = {tuple(sorted(terms)) for terms in sums(256, 256, 0)["heldout"]}
    drawn = itertools.islice(small_model.sum_demonstrations(np.random.default_rng(0)), 2000)
    asked = {tuple(sorted(map(int, re.findall(r"\d+", messages[-1]["content"])))) for messages, _ in drawn}
    assert len(asked) > 500 and not asked & heldout


def test_sums_with_two_carries_that_a_run_evaluates_on_are_in_no_demonstration(tmp_path):
    small_model.write_carries(tmp_path)
    heldout = {tuple(sorted(terms)) for terms in sums(256, 256, 0)["heldout"]}
    for split, number in (("train", 256), ("val", 93)):
        prompts = [json.loads(line)["prompt"] for line in (tmp_path / f"{split}.jsonl").read_text().splitlines()]
        asked = {tuple(map(int, re.findall(r"\d+", messages[-1]["content"]))) for messages in prompts}
        assert len(asked) == number and {tuple(sorted(terms)) in heldout for terms in asked} == {split == "val"}
        assert all(a % 10 + b % 10 > 9 and (a + b) % 10 + c % 10 > 9 for a, b, c in asked)


def test_problems_that_are_too_hard_are_three_of_four_and_in_no_evaluation(tmp_path):
    small_model.write_too_hard(tmp_path)
    known = sums(256, 256, 0)
    for split, of_sums in (("train", "train"), ("val", "heldout")):
        prompts = [json.loads(line)["prompt"] for line in (tmp_path / f"{split}.jsonl").read_text().splitlines()]
        asked = [tuple(map(int, re.findall(r"\d+", messages[-1]["content"]))) for messages in prompts]
        assert sorted(terms for terms in asked if len(terms) < 6) == sorted(known[of_sums])
        assert sum(len(terms) == 6 for terms in asked) == (3 * 256 if split == "train" else 0)


def test_no_demonstration_is_of_a_word_that_a_run_holds_out():
    pytest.importorskip("reasoning_gym")
    shared = ablations.COMPARISONS["filter_spelling"].shared
    config = read_config(["train", RECIPE, *(f"--config.{key}={value}" for key, value in shared.items())])
    gym = config.data.reasoning_gym
    drawn = itertools.islice(small_model.spelling_demonstrations(np.random.default_rng(0)), 5000)
    asked = {messages[-1]["content"] for messages, _ in drawn}
    assert len(asked) > 1000
    for seed in range(5):
        _, heldout = reasoning_gym_rows(dataclasses.replace(gym, num_train=1), seed)
        assert not asked & {row.prompt[-1]["content"] for row in heldout}


def test_a_run_asks_as_the_demonstrations_do_and_knows_all_their_tokens():
    """Its recipe begins every prompt with an empty system message."""
    pytest.importorskip("reasoning_gym")
    tokenizer, message = small_model.small_tokenizer(), {"role": "user", "content": "8 + 5 = ?"}
    config = read_config(["train", RECIPE])
    assert config.data.system_prompt is not None
    asked = tokenizer.encode_prompts([(message,)], config.data)
    assert asked == tokenizer.encode_prompts([(message,)], DataConfig())
    check_tokens(tokenizer)


def check_tokens(tokenizer):
    unknown = tokenizer.backend.token_to_id("<unk>")
    for tokens, mask in itertools.islice(small_model.batches(tokenizer, 8, 1), 8):
        assert not (tokens == unknown).any()
        for row, kept in zip(tokens, mask, strict=True):
            text = tokenizer.decode(row[kept].tolist())
            assert text and tokenizer.encode(text) == [token for token in row[kept] if token not in tokenizer.eos_ids]


@pytest.mark.slow
def test_the_model_is_read_with_its_tokens(tmp_path, monkeypatch, capsys):
    pytest.importorskip("reasoning_gym")
    output = tmp_path / "model"
    monkeypatch.setattr(sys, "argv", ["small_model", f"--output={output}", "--steps=2", "--batch-size=4"])
    small_model.main()
    assert f"the model is in {output}" in capsys.readouterr().out
    assert read_architecture(output) == small_model.architecture()
    check_tokens(load_tokenizer(output))
