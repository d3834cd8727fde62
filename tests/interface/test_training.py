"""A run from a program, and what its result gives."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file
from small_families import with_tokenizer
from small_run import small_config

import dapo_jax as dx
from dapo_jax.command.validation import validate
from dapo_jax.config.sections import ArithmeticConfig, EnvironmentConfig, JudgeConfig
from dapo_jax.interface.environments import with_environment
from dapo_jax.training import loop as training


@pytest.mark.slow
def test_a_result_exports_the_adapters_of_its_run(tmp_path):
    """Those of result.policy() are new ones, for a model into which the run's are merged."""
    source = with_tokenizer("llama_tied", tmp_path)
    lora = {"model.path": source, "model.lora.rank": 2, "actor.optim.lr": 1e-2}
    rewarded = small_config(tmp_path / "run", **lora, **{"trainer.total_training_steps": 1})
    result = dx.train(rewarded, reward=len)
    result.export(tmp_path / "adapter", dtype="float32", adapter=True)
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert max(np.abs(values).max() for name, values in tensors.items() if "lora_B" in name) > 1e-3
    described = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == source
    with result.policy() as policy, pytest.raises(dx.InputError, match="is a run with weights of its own"):
        policy.export(tmp_path / "none", adapter=True)
    assert not (tmp_path / "none").exists()


def test_environments_of_one_class_name_are_told_apart():
    """Classes that have no name by which a process could find them: each is that of its own name."""
    made = [type("Lake", (), {"step": lambda self, text, size=size: (str(size), 0.0, True)}) for size in (3, 5)]
    config = with_environment(small_config("unused"), dict(zip(("small", "large"), made, strict=True)), None)
    assert json.loads(config.environment.path) == {"small": "python:small", "large": "python:large"}


def test_options_of_what_an_argument_replaces_get_their_defaults(tmp_path, monkeypatch):
    """As on the command line: those of a verifier, of an environment, and of a task."""
    trained = []
    monkeypatch.setattr(training, "train", lambda config, on_step: trained.append(config))
    judge = {"reward.function": "judge", "reward.judge.base_url": "http://a/v1", "reward.judge.model": "m"}
    recipe = dx.load_config("tiny", {"workdir": str(tmp_path), **judge, "environment.max_turns": 3})
    recipe.environment.path = "lake.py:Lake"
    dx.train(recipe, reward=len, environment="", data=[{"prompt": "1 + 1 =", "answer": "2"}])
    [config] = trained
    validate(config)
    assert config.reward.judge == JudgeConfig() and config.environment == EnvironmentConfig()
    assert config.data.arithmetic == ArithmeticConfig()
    dx.train(recipe, reward=len, **{"reward.judge.model": "n"})
    with pytest.raises(dx.InputError, match="reward.judge.model='n' is not read"):
        validate(trained[-1])
