"""The demonstrations that the small model of the comparisons learns from, and the model as a run reads it."""

import itertools
import sys

import numpy as np
import pytest
import small_model
from prepare_sums import sums

from dapo_jax.data.tokenizer import load_tokenizer
from dapo_jax.models.load import read_model_architecture

pytest.importorskip("reasoning_gym")


def test_no_demonstration_is_of_a_held_out_sum():
    heldout = {" + ".join(map(str, terms)) + " = ?" for terms in sums(256, 256, 0)["heldout"]}
    drawn = itertools.islice(small_model.sum_demonstrations(np.random.default_rng(0)), 2000)
    assert not {messages[-1]["content"] for messages, _ in drawn} & heldout


def test_the_model_is_read_with_its_tokens(tmp_path, monkeypatch, capsys):
    output = tmp_path / "model"
    monkeypatch.setattr(sys, "argv", ["small_model", f"--output={output}", "--steps=2", "--batch-size=4"])
    small_model.main()
    assert f"the model is in {output}" in capsys.readouterr().out
    assert read_model_architecture(output) == small_model.architecture()
    tokenizer = load_tokenizer(output)
    for tokens, mask in itertools.islice(small_model.batches(tokenizer, 8, 1), 8):
        unknown = tokenizer.backend.token_to_id("<unk>")
        assert not (tokens == unknown).any()
        for row, kept in zip(tokens, mask, strict=True):
            text = tokenizer.decode(row[kept].tolist())
            assert text and tokenizer.encode(text) == [token for token in row[kept] if token not in tokenizer.eos_ids]
