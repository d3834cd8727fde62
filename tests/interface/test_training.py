"""A run from a program, and what its result gives."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file
from small_families import with_tokenizer
from small_run import small_config

import dapo_jax as dx


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
