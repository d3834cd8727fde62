"""Model directories are read one leaf at a time, and refused with the way out."""

import dataclasses
import json
import shutil
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.checkpoints import DATA, place
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from dapo_jax.data.model_files import read_object
from dapo_jax.models import load as module
from dapo_jax.models.hf_architecture import context_length, read_architecture
from dapo_jax.models.load import load_params
from dapo_jax.models.weights import weight_table
from dapo_jax.models.write_safetensors import write_safetensors

TIED = DATA / "qwen2_bias_tied"
ARCH = read_architecture(TIED)
UP, NORM, EMBEDDING = "model.layers.1.mlp.up_proj.weight", "model.norm.weight", "model.embed_tokens.weight"
HEAD = "lm_head.weight"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


def load(directory, arch=ARCH):
    return load_params(directory, arch, place)


def save(directory, tensors):
    save_file(tensors, directory / "model.safetensors")
    return directory


def shard(directory):
    """Several files, and which tensor is in which."""
    write_safetensors(directory, weight_table(ARCH), load(TIED), dtype="float32", max_shard_bytes=50_000)
    return json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]


@pytest.fixture
def tensors():
    return load_file(TIED / "model.safetensors")


@pytest.fixture
def reads(monkeypatch):
    """The names of the tensors that have been read whole."""
    names = []

    class Recorded:
        def __init__(self, *arguments, **named):
            self.file = safe_open(*arguments, **named)

        def __enter__(self):
            self.file.__enter__()
            return self

        def __exit__(self, *error):
            self.file.__exit__(*error)

        def __getattr__(self, name):
            return getattr(self.file, name)

        def get_tensor(self, name):
            names.append(name)
            return self.file.get_tensor(name)

    monkeypatch.setattr(module, "safe_open", Recorded)
    return names


def assert_equal(params, expected):
    jax.tree.map(np.testing.assert_array_equal, params, expected)


def test_the_host_holds_one_leaf_at_a_time_in_float32(reads):
    previous = []

    def place_one(weight, array):
        assert (array.shape, array.dtype) == (weight.shape, np.float32)
        assert all(reference() is None for reference in previous), "an earlier leaf is still on the host"
        assert reads == weight.tensors, "tensors of another leaf were read"
        reads.clear()
        previous.append(weakref.ref(array))
        return jnp.array(array, copy=True)

    load_params(TIED, ARCH, place_one)
    assert len(previous) == len(weight_table(ARCH)) and reads == []


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16])
def test_half_precision_files_give_float32_parameters_of_the_same_value(tmp_path, tensors, dtype):
    save(tmp_path, {name: tensor.astype(dtype) for name, tensor in tensors.items()})
    params, exact = load(tmp_path), load(TIED)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float32)}
    assert_equal(params, jax.tree.map(lambda leaf: np.asarray(leaf).astype(dtype).astype(np.float32), exact))


def test_all_problems_are_reported_together_and_nothing_is_read(tmp_path, tensors, reads):
    changed = tensors | {NORM: np.ones(47), "model.extra.weight": np.ones((2, 2), np.int8)}
    del changed[UP]
    with pytest.raises(ValueError) as error:
        load(save(tmp_path, changed))
    assert str(error.value).partition("download): ")[2].split("; ") == [
        "tensor model.extra.weight has dtype I8, expected one of ('F32', 'F16', 'BF16')",
        "tensor model.norm.weight has dtype F64, expected one of ('F32', 'F16', 'BF16')",
        "tensor model.layers.1.mlp.up_proj.weight of shape (80, 48) is missing",
        "tensor model.extra.weight of shape (2, 2) is unknown",
        "tensor model.norm.weight has shape (47,), expected (48,)",
    ]
    with pytest.raises(ValueError, match=f"(.* is missing){{10}}; and {len(tensors) - 10} more$"):
        load(save(tmp_path, {}))
    assert reads == []


def test_rotary_buffers_and_the_head_of_tied_embeddings_are_not_read(tmp_path, tensors):
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    assert_equal(load(save(tmp_path, tensors | {HEAD: tensors[EMBEDDING]})), load(TIED))
    with pytest.raises(ValueError, match=r"lm_head.weight has shape \(159, 48\), expected \(160, 48\)"):
        load(save(tmp_path, tensors | {HEAD: np.ones((159, 48), np.float32)}))


@pytest.mark.parametrize("rows", [4096, 7])
def test_a_head_that_differs_from_the_embeddings_is_not_thrown_away(tmp_path, tensors, monkeypatch, rows):
    monkeypatch.setattr(module, "ROWS", rows)
    head = tensors[EMBEDDING].copy()
    head[-1, -1] += 1
    message = "lm_head.weight differs from model.embed_tokens.weight, .*tie_word_embeddings=true: set it to false there"
    with pytest.raises(ValueError, match=message):
        load(save(tmp_path, tensors | {HEAD: head}))


def test_a_scalar_head_is_read_as_one_row_and_the_vocabularys_is_refused(tmp_path, tensors):
    scoring = dataclasses.replace(ARCH, tie_embeddings=False, scalar_head=True)
    score = np.arange(48, dtype=np.float32)
    params = load(save(tmp_path, tensors | {"score.weight": score[None]}), scoring)
    np.testing.assert_array_equal(params.pop("score"), score)
    assert_equal(params, load(TIED))
    save(tmp_path, tensors | {"score.weight": np.stack([score, score]), HEAD: np.ones((160, 48), "f4")})
    with pytest.raises(ValueError, match=r"score.weight has shape \(2, 48\), expected \(1, 48\)") as error:
        load(tmp_path, scoring)
    assert "tensor lm_head.weight of shape (160, 48) is unknown" in str(error.value)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", [NORM, UP])
def test_a_value_that_is_not_finite_is_refused_with_its_tensor(tmp_path, tensors, value, name):
    tensors[name].flat[3] = value
    with pytest.raises(ValueError, match=f"1 of {tensors[name].size} values of tensor {name} are NaN or infinite: "):
        load(save(tmp_path, tensors))


def test_a_tensor_in_two_shards_or_a_missing_shard_is_an_error(tmp_path, tensors):
    weight_map = shard(tmp_path)
    other = next(name for name in weight_map.values() if name != weight_map[UP])
    save_file(load_file(tmp_path / other) | {UP: tensors[UP]}, tmp_path / other)
    with pytest.raises(ValueError, match=f"tensor {UP} is in more than one file"):
        load(tmp_path)
    (tmp_path / other).unlink()
    with pytest.raises(ValueError, match=rf"do not exist: \['{other}'\]: download them"):
        load(tmp_path)


def test_a_directory_without_weights_or_with_a_damaged_index_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="holds neither model.safetensors nor model.safetensors.index.json"):
        load(tmp_path)
    for names in (None, ["a"], {"a": 3}, {"a": "../a.safetensors"}):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
        with pytest.raises(ValueError, match="index.json must have a weight_map"):
            load(tmp_path)


def test_a_truncated_file_or_a_git_lfs_pointer_is_an_error(tmp_path):
    file = Path(shutil.copy(TIED / "model.safetensors", tmp_path))
    content = file.read_bytes()
    for length in (0, 4, 100, len(content) - 1):
        file.write_bytes(content[:length])
        with pytest.raises(ValueError, match="model.safetensors is damaged or incomplete"):
            load(tmp_path)
    file.write_text(POINTER)
    with pytest.raises(ValueError, match="model.safetensors is a Git LFS pointer, not the file itself: run 'git lfs"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("absent", "does not exist: give a model directory"),
        ("model.bin", "is a file: give a model directory"),
        ("absent.gguf", r"is a GGUF file.*: convert it with transformers.*save_pretrained\(DIR\).*config.json"),
        ("model.gguf", r"is a GGUF file.*: convert it with transformers.*save_pretrained\(DIR\).*config.json"),
    ],
)
def test_what_is_no_directory_is_refused_with_the_way_out(tmp_path, name, told):
    (tmp_path / "model.bin").write_bytes(b"weights")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for read in (read_architecture, context_length, load):
        with pytest.raises(ValueError, match=f"the model path .*{name} {told}"):
            read(tmp_path / name)
    (tmp_path / "a.gguf").symlink_to(TIED)  # a directory may be called like a file
    assert read_architecture(tmp_path / "a.gguf") == ARCH


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is damaged or incomplete .Expecting property name"),
        (b"", "is damaged or incomplete .Expecting value"),
        (b"[1]", "must hold a JSON object, not a list: download it again"),
        (b"null", "must hold a JSON object, not a NoneType"),
        (b"\xff\xfe", "is damaged or incomplete .'utf-8' codec"),
        (b"[" * 100_000, "is damaged or incomplete .maximum recursion"),
        (POINTER.encode(), "is a Git LFS pointer"),
    ],
)
def test_a_file_without_a_json_object_is_named(tmp_path, content, message):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=f"config.json {message}"):
        read_object(tmp_path / "config.json")
    (tmp_path / "config.json").write_text('{"ü": [1]}', encoding="utf-8")
    assert read_object(tmp_path / "config.json") == {"ü": [1]}
