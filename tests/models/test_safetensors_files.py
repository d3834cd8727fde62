import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.checkpoints import DATA, place
from safetensors.numpy import load_file, save_file

from dapo_jax.models import safetensors_files
from dapo_jax.models.hf_architecture import read_architecture
from dapo_jax.models.safetensors_files import load_safetensors
from dapo_jax.models.weights import weight_table
from dapo_jax.models.write_safetensors import write_safetensors

TIED = DATA / "qwen2_bias_tied"
UP = "model.layers.1.mlp.up_proj.weight"


def load(directory):
    return load_safetensors(directory, read_architecture(TIED), place)


def save(directory, tensors):
    save_file(tensors, directory / "model.safetensors")
    return directory


def shard(directory):
    """Several files, and which tensor is in which."""
    arch = read_architecture(TIED)
    write_safetensors(directory, weight_table(arch), load(TIED), dtype="float32", max_shard_bytes=50_000)
    return json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]


@pytest.fixture
def tensors():
    return load_file(TIED / "model.safetensors")


def assert_equal(params, expected):
    jax.tree.map(np.testing.assert_array_equal, params, expected)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16])
def test_half_precision_files_give_float32_parameters_of_the_same_value(tmp_path, tensors, dtype):
    save(tmp_path, {name: tensor.astype(dtype) for name, tensor in tensors.items()})
    params, exact = load(tmp_path), load(TIED)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float32)}
    assert_equal(params, jax.tree.map(lambda leaf: np.asarray(leaf).astype(dtype).astype(np.float32), exact))


def test_another_dtype_is_an_error(tmp_path, tensors):
    save(tmp_path, tensors | {UP: tensors[UP].astype(np.int8), "model.norm.weight": np.ones(48)})
    with pytest.raises(ValueError, match="up_proj.weight has dtype I8, expected.*norm.weight has dtype F64"):
        load(tmp_path)


def test_rotary_buffers_and_the_head_of_tied_embeddings_are_not_read(tmp_path, tensors):
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    save(tmp_path, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]})
    assert_equal(load(tmp_path), load(TIED))
    save(tmp_path, tensors | {"lm_head.weight": np.ones((159, 48), np.float32)})
    with pytest.raises(ValueError, match=r"lm_head.weight has shape \(159, 48\), expected \(160, 48\)"):
        load(tmp_path)


@pytest.mark.parametrize("rows", [4096, 7])
def test_a_head_that_differs_from_the_embeddings_is_not_thrown_away(tmp_path, tensors, monkeypatch, rows):
    monkeypatch.setattr(safetensors_files, "ROWS", rows)
    head = tensors["model.embed_tokens.weight"].copy()
    head[-1, -1] += 1
    save(tmp_path, tensors | {"lm_head.weight": head})
    message = "lm_head.weight differs from model.embed_tokens.weight, .*tie_word_embeddings=true: set it to false there"
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def test_a_scalar_head_is_read_as_one_row_and_the_vocabularys_is_refused(tmp_path, tensors):
    scoring = dataclasses.replace(read_architecture(TIED), tie_embeddings=False, scalar_head=True)
    score = np.arange(48, dtype=np.float32)
    save(tmp_path, tensors | {"score.weight": score[None]})
    params = load_safetensors(tmp_path, scoring, place)
    np.testing.assert_array_equal(params.pop("score"), score)
    assert_equal(params, load(TIED))
    save(tmp_path, tensors | {"score.weight": np.stack([score, score]), "lm_head.weight": np.ones((160, 48), "f4")})
    with pytest.raises(ValueError, match=r"score.weight has shape \(2, 48\), expected \(1, 48\)") as error:
        load_safetensors(tmp_path, scoring, place)
    assert "tensor lm_head.weight of shape (160, 48) is unknown" in str(error.value)
    save(tmp_path, tensors)
    with pytest.raises(ValueError, match=r"score.weight of shape \(1, 48\) is missing"):
        load_safetensors(tmp_path, scoring, place)


def test_a_tensor_in_two_shards_is_an_error(tmp_path, tensors):
    weight_map = shard(tmp_path)
    other = next(name for name in weight_map.values() if name != weight_map[UP])
    save_file(load_file(tmp_path / other) | {UP: tensors[UP]}, tmp_path / other)
    with pytest.raises(ValueError, match=f"tensor {UP} is in more than one file"):
        load(tmp_path)


def test_a_directory_without_weights_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="holds neither model.safetensors nor model.safetensors.index.json"):
        load(tmp_path)


def test_a_missing_shard_is_an_error(tmp_path):
    missing = sorted(set(shard(tmp_path).values()))[1]
    (tmp_path / missing).unlink()
    with pytest.raises(ValueError, match=rf"do not exist: \['{missing}'\]: download them"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "must have a weight_map"),
        ('{"weight_map": ["a"]}', "must have a weight_map"),
        ('{"weight_map": {"a": 3}}', "must have a weight_map"),
        ('{"weight_map": {"a": "../a.safetensors"}}', "must have a weight_map"),
    ],
)
def test_a_damaged_index_is_an_error(tmp_path, text, message):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=f"index.json {message}"):
        load(tmp_path)


def test_a_truncated_file_or_a_git_lfs_pointer_is_an_error(tmp_path):
    file = Path(shutil.copy(TIED / "model.safetensors", tmp_path))
    content = file.read_bytes()
    for length in (0, 4, 100, len(content) - 1):
        file.write_bytes(content[:length])
        with pytest.raises(ValueError, match="model.safetensors is damaged or incomplete"):
            load(tmp_path)
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(ValueError, match="model.safetensors is a Git LFS pointer"):
        load(tmp_path)
