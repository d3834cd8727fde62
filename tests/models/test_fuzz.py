"""Readers of model files meet any bytes: a result or a ValueError, never a crash, a hang or memory without measure."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import shapes
from damaged_bytes import JSON, damaged, fuzz, little_memory, read_or_refused
from ends_within import ends_within
from hypothesis import example, given
from hypothesis import strategies as st
from models.hf_configs import hf_config
from safetensors.numpy import save

from dapo_jax.config.sections import DataConfig
from dapo_jax.data.tokenizer import character_tokenizer, load_tokenizer
from dapo_jax.models.architecture import Architecture
from dapo_jax.models.hf_architecture import architecture_from_hf, read_architecture
from dapo_jax.models.load import load_params
from dapo_jax.models.weights import weight_table

SIZES = {"vocab_size": 8, "hidden_size": 4, "intermediate_size": 6, "num_heads": 2, "num_kv_heads": 1, "head_dim": 2}
ARCH = dataclasses.replace(
    shapes.ARCH, **SIZES, rms_norm_eps=2.0**-17, tie_embeddings=True, initializer_range=Architecture.initializer_range
)
HF = hf_config(ARCH, eos_id=1) | {"max_position_embeddings": 64}


def tensors(name_of) -> dict[str, np.ndarray]:
    return {
        name_of(weight).format(layer=layer): np.full(weight.hf_shape, 0.5, np.float32)
        for weight in weight_table(ARCH)
        for layer in range(ARCH.num_layers if weight.stacked else 1)
    }


def keep(weight, array):
    return array


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """New directories, one an example: readers may keep what they know of a file."""
    root = tmp_path_factory.mktemp("fuzz")
    return (root / str(number) for number in range(10**6))


def new(places, **files: bytes) -> Path:
    path = next(places)
    path.mkdir()
    for name, content in files.items():
        (path / name.replace("__", ".")).write_bytes(content)
    return path


SAFETENSORS = save(tensors(lambda weight: weight.hf_name))
HEADER = 8 + int.from_bytes(SAFETENSORS[:8], "little")


@fuzz(400)
@given(damaged(SAFETENSORS, header=HEADER))
@example(SAFETENSORS)
def test_safetensors(places, content):
    path = new(places, model__safetensors=content)
    with little_memory(), ends_within(), read_or_refused(path):
        params = load_params(path, ARCH, keep)
        assert params["layers"]["query"].shape == (2, 4, 2, 2)


@fuzz(100)
@given(damaged(b'{"weight_map": {"a": "b.safetensors"}}') | JSON.map(lambda value: json.dumps(value).encode()))
def test_the_index_of_safetensors(places, content):
    path = new(places, model__safetensors__index__json=content)
    with pytest.raises(ValueError, match=str(path)):
        load_params(path, ARCH, keep)


@fuzz(300)
@given(st.dictionaries(st.sampled_from([*HF, "rope_parameters", "layer_types", "id2label"]), JSON, max_size=3))
@example({})
def test_configs_with_other_values(changes):
    with read_or_refused():
        arch = architecture_from_hf(json.loads(json.dumps({**HF, **changes})))
        assert arch.num_heads % arch.num_kv_heads == 0 and arch.head_dim % 2 == 0


@fuzz(200)
@given(damaged(json.dumps(HF).encode()))
def test_damaged_configs(places, content):
    path = new(places, config__json=content)
    with read_or_refused(path):
        read_architecture(path)


TOKENIZER = character_tokenizer().backend.to_str().encode()
SETTINGS = {"eos_token": "<eos>", "pad_token": "<pad>", "chat_template": "{{ messages }}", "add_bos_token": False}


@fuzz(300)
@given(damaged(TOKENIZER))
def test_damaged_tokenizers(places, content):
    path = new(places, tokenizer__json=content, tokenizer_config__json=json.dumps(SETTINGS).encode())
    with little_memory(), ends_within(), read_or_refused(path):
        load_tokenizer(path).encode("1 + 1 =")


@fuzz(200)
@given(
    st.dictionaries(st.sampled_from([*SETTINGS, "bos_token"]), JSON, max_size=3),
    st.dictionaries(st.just("eos_token_id"), JSON),
)
def test_tokenizers_with_other_settings(places, settings, generation):
    path = new(
        places,
        tokenizer__json=TOKENIZER,
        tokenizer_config__json=json.dumps(SETTINGS | settings).encode(),
        generation_config__json=json.dumps(generation).encode(),
    )
    with read_or_refused(path):
        load_tokenizer(path).encode_prompts(["1 + 1 ="], DataConfig())[0]
