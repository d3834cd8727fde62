"""Adapters against PEFT's, which is skipped where torch or PEFT is missing."""

import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.checkpoints import DATA, model, score

from dapo_jax.models.hf_architecture import read_architecture
from dapo_jax.models.lora import (
    TARGETS,
    Lora,
    adapter_table,
    init_adapters,
    merged,
    peft_config,
    present_targets,
    with_adapters,
)
from dapo_jax.models.write_safetensors import write_safetensors

LORA = Lora(rank=3, alpha=12.0, targets=tuple(TARGETS))


def moved_adapters(arch, lora):
    rng = np.random.default_rng(0)
    fresh = jax.device_get(jax.jit(init_adapters, static_argnums=(0, 1))(arch, lora, 0))
    return jax.tree.map(lambda x: np.float32(x + 0.05 * rng.normal(size=x.shape)), fresh)


@functools.partial(jax.jit, static_argnums=3)
def score_with_adapters(params, adapters, tokens, arch):
    return score(with_adapters(params, adapters, LORA, jnp.float32), tokens, jnp.ones(tokens.shape, bool), arch)


jit_merged = jax.jit(merged, static_argnums=2)


def model_with_adapters(name):
    arch, params = model(name)
    return arch, params, moved_adapters(arch, LORA), np.random.default_rng(1).integers(0, arch.vocab_size, (2, 9))


@pytest.mark.short("qwen2_bias_tied")
@pytest.mark.parametrize("name", ["llama_tied", "qwen2_bias_tied"])
def test_adapters_apart_and_merged_give_the_same_logits(name):
    arch, params, adapters, tokens = model_with_adapters(name)
    apart = score_with_adapters(params, adapters, tokens, arch)
    mask = np.ones(tokens.shape, bool)
    together = score(jit_merged(params, adapters, LORA), tokens, mask, arch)
    assert np.abs(apart - score(params, tokens, mask, arch)).max() > 0.01
    np.testing.assert_allclose(apart, together, atol=1e-4)


@pytest.mark.parametrize("name", ["llama_tied", "qwen2_bias_tied"])
def test_written_adapters_act_in_peft_as_they_do_here(name, tmp_path):
    torch = pytest.importorskip("torch")
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    directory = DATA / name
    arch, params, adapters, tokens = model_with_adapters(name)
    apart = score_with_adapters(params, adapters, tokens, arch)
    write_safetensors(tmp_path, adapter_table(arch, LORA), adapters, dtype="float32", name="adapter_model")
    (tmp_path / "adapter_config.json").write_text(json.dumps(peft_config(LORA, str(directory))))
    shutil.copytree(directory, tmp_path / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path).eval()
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(apart, expected, atol=1e-4)


def test_a_target_without_adapters_is_left_alone():
    arch, params, *_ = model_with_adapters("qwen2_bias_tied")
    lora = dataclasses.replace(LORA, targets=("v_proj",))
    whole = jit_merged(params, moved_adapters(arch, lora), lora)
    changed = {name for name in params["layers"] if (whole["layers"][name] != params["layers"][name]).any()}
    assert changed == {"value"}


def test_all_linear_is_what_the_model_has():
    names = "qwen3_5", "qwen3_qknorm", "qwen3_moe"
    recurrent, dense, mixed = (present_targets(read_architecture(DATA / name)) for name in names)
    assert recurrent == tuple(TARGETS) and dense == recurrent[:7] and recurrent[7] == "in_proj_qkv"
    assert mixed == ("q_proj", "k_proj", "v_proj", "o_proj")
