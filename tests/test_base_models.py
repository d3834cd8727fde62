"""Checks on a model before it is read."""

import dataclasses
import json
from pathlib import Path

import pytest
import tokenizers
from small_run import small_config
from tokenizers.models import WordLevel

from dapo_jax.config.sections import ModelConfig
from dapo_jax.monitor.recipe import write_config
from dapo_jax.run.base_models import check_model_paths, context_warning, model_paths, read_model

MODEL = Path(__file__).parent / "models" / "data" / "llama_tied"  # made for 512 positions


@pytest.mark.parametrize(("prompt", "response", "warned"), [(500, 12, False), (500, 13, True), (64, 449, True)])
def test_texts_beyond_the_context_of_the_model_are_warned_of(prompt, response, warned, tmp_path):
    lengths = {"data.max_prompt_length": prompt, "data.max_response_length": response}
    config = small_config(tmp_path, **lengths, **{"model.path": str(MODEL)})
    line = context_warning(config.model.path, config.data)
    assert (line is not None) == warned
    if line is not None:
        assert f"{prompt + response} tokens exceed the 512 positions that {MODEL} was made for" in line
    assert context_warning("random", config.data) is None


def test_every_model_that_is_missing_is_named_at_once(tmp_path):
    paths = {"model.path": str(tmp_path / "a"), "reward.model.path": "models/RM"}
    with pytest.raises(ValueError, match="model.path=.*/a does not exist: give.*\nreward.model.path=models/RM does no"):
        check_model_paths(model_paths(small_config(tmp_path, **paths)))
    check_model_paths(model_paths(small_config(tmp_path, **{"model.path": str(MODEL)})))


@pytest.fixture
def model_of_embeddings(tmp_path):
    """Makes a model directory with so many embeddings, whose tokenizer has three tokens and an added fourth."""

    def make(vocab_size, eos="b"):
        backend = tokenizers.Tokenizer(WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="c"))
        backend.add_special_tokens(["<image>"])
        backend.save(str(tmp_path / "tokenizer.json"))
        hf = json.loads((MODEL / "config.json").read_text())
        hf |= {"vocab_size": vocab_size, "eos_token_id": backend.token_to_id(eos)}
        (tmp_path / "config.json").write_text(json.dumps(hf))
        return ModelConfig(str(tmp_path))

    return make


def test_only_added_tokens_without_embeddings_may_be_left_out(model_of_embeddings):
    arch, tokenizer = read_model(model_of_embeddings(3))
    assert arch.vocab_size == tokenizer.vocab_size == 3
    assert tokenizer.encode("<image>") == [2]
    assert read_model(model_of_embeddings(4))[1].encode("<image>") == [3]
    message = "has ids up to {}, but the model has {} embeddings: use the tokenizer that belongs to the model; .*added"
    with pytest.raises(ValueError, match=message.format(2, 2)):
        read_model(model_of_embeddings(2))
    with pytest.raises(ValueError, match=message.format(3, 3)):
        read_model(model_of_embeddings(3, eos="<image>"))


def test_a_step_of_a_run_is_found_if_its_checkpoints_are_elsewhere(tmp_path, monkeypatch):
    before = small_config(tmp_path / "run", **{"trainer.checkpoint_dir": str(tmp_path / "elsewhere")})
    (tmp_path / "run").mkdir()
    write_config(tmp_path / "run", dataclasses.asdict(before))
    monkeypatch.setattr("dapo_jax.run.other_runs.saved_steps", lambda directory: [2])
    check_model_paths({"model.path": f"{tmp_path}/run/checkpoints/2"})
    with pytest.raises(ValueError, match="holds steps"):
        check_model_paths({"model.path": f"{tmp_path}/run/checkpoints/3"})
