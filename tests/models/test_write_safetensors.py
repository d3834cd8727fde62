import itertools
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from models.checkpoints import DATA, place
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from dapo_jax.models import write_safetensors as module
from dapo_jax.models.hf_architecture import read_architecture
from dapo_jax.models.load import load_params
from dapo_jax.models.weights import Weight, weight_table
from dapo_jax.models.write_safetensors import write_safetensors
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.parallel.sharding import TRAIN_RULES, place_weight

NAMES = ["llama3_rope_scaled", "llama_tied", "qwen2_bias_tied", "qwen3_qknorm"]
TIED, UNTIED = "qwen2_bias_tied", "qwen3_qknorm"


def model(name, path=None, place=place):
    """Weight table of the model `name`, and its parameters as `path` holds them."""
    arch = read_architecture(DATA / name)
    return weight_table(arch), load_params(path or DATA / name, arch, place)


def original(name):
    return load_file(DATA / name / "model.safetensors")


def assert_same_tensors(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert found[name].tobytes() == tensor.tobytes(), name


@pytest.mark.parametrize("name", NAMES)
def test_a_model_read_and_written_is_the_same_file_bit_by_bit(tmp_path, name):
    write_safetensors(tmp_path, *model(name), dtype="float32")
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
    assert_same_tensors(load_file(tmp_path / "model.safetensors"), original(name))
    with safe_open(tmp_path / "model.safetensors", framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}


def test_bfloat16_rounds_to_the_nearest_and_half_way_to_even(tmp_path):
    values = np.array([1 + 2**-9, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-16], np.float32)
    table = [Weight(("final_norm",), (4,), ("norm",), "ones", "model.norm.weight", (4,))]
    write_safetensors(tmp_path, table, {"final_norm": values}, dtype="bfloat16")
    found = load_file(tmp_path / "model.safetensors")["model.norm.weight"]
    assert found.astype(np.float32).tolist() == [1, 1, 1 + 2**-6, 1 + 2**-7]


@pytest.mark.parametrize("name", [TIED, UNTIED])
def test_shards_hold_every_tensor_once_and_keep_to_their_size(tmp_path, name):
    limit = 20_000  # the embedding alone is larger; a projection's layers go into different files
    write_safetensors(tmp_path, *model(name), dtype="float32", max_shard_bytes=limit)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == sorted(path.name for path in tmp_path.glob("*.safetensors")) and len(files) > 3
    assert files == [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    together, sizes = {}, []
    for file in files:
        tensors = load_file(tmp_path / file)
        assert all(index["weight_map"][tensor] == file for tensor in tensors) and not tensors.keys() & together.keys()
        sizes.append(sum(tensor.nbytes for tensor in tensors.values()))
        assert len(tensors) == 1 or sizes[-1] <= limit
        together |= tensors
    assert all(size + following > limit for size, following in itertools.pairwise(sizes)), "no more files than needed"
    assert_same_tensors(together, original(name))
    assert index["metadata"]["total_size"] == sum(sizes)
    jax.tree.map(np.testing.assert_array_equal, model(name, tmp_path)[1], model(name)[1])


def test_parameters_divided_over_a_mesh_are_written_whole(tmp_path):
    table, params = model(UNTIED, place=place_weight(make_mesh(2, 2, 2), TRAIN_RULES))
    query = params["layers"]["query"]
    assert query.addressable_shards[0].data.size * 4 == query.size
    write_safetensors(tmp_path, table, params, dtype="float32", max_shard_bytes=50_000)
    found = {name: tensor for path in tmp_path.glob("*.safetensors") for name, tensor in load_file(path).items()}
    assert_same_tensors(found, original(UNTIED))
    assert all(leaf._npy_value is None for leaf in jax.tree.leaves(params)), "the host keeps no copy of the model"


def test_other_parameters_than_the_tables_are_refused(tmp_path):
    table, params = model(TIED)
    del params["final_norm"]
    params["embedding"] = params["embedding"].T
    params["head"] = np.zeros((160, 48), np.float32)
    with pytest.raises(ValueError) as error:
        write_safetensors(tmp_path, table, params, dtype="float32")
    missing, unknown = str(error.value).split("unknown")
    assert "(('embedding',), (160, 48)), (('final_norm',), (48,))" in missing
    assert "(('embedding',), (48, 160)), (('head',), (160, 48))" in unknown
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("whole", [0, 2])
def test_a_write_that_breaks_off_leaves_nothing_that_looks_whole(tmp_path, monkeypatch, whole):
    table, params = model(TIED)
    calls = []

    def breaking(tensors, path, metadata):
        calls.append(path)
        if len(calls) > whole:
            Path(path).write_bytes(b"half")
            raise OSError("no space left on device")
        save_file(tensors, path, metadata)

    monkeypatch.setattr(module, "save_file", breaking)
    with pytest.raises(OSError, match="no space"):
        write_safetensors(tmp_path, table, params, dtype="float32", max_shard_bytes=20_000)
    assert len(list(tmp_path.glob("*.safetensors"))) == whole
    with pytest.raises(ValueError, match="holds neither"):
        model(TIED, tmp_path)


def test_whoever_may_read_a_new_file_may_read_the_weights(tmp_path):
    (tmp_path / "new").touch()
    write_safetensors(tmp_path, *model(TIED), dtype="float32")
    assert (tmp_path / "model.safetensors").stat().st_mode == (tmp_path / "new").stat().st_mode


def test_only_process_0_writes_and_the_others_take_part_in_every_gather(tmp_path, monkeypatch):
    table, params = model(TIED)
    gathered = []
    monkeypatch.setattr(module, "fetch", lambda leaf: gathered.append(leaf.shape) or leaf)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    write_safetensors(tmp_path, table, params, dtype="float32", max_shard_bytes=20_000)
    assert not list(tmp_path.iterdir())
    others, gathered[:] = gathered[:], []
    monkeypatch.setattr(jax, "process_index", lambda: 0)
    write_safetensors(tmp_path, table, params, dtype="float32", max_shard_bytes=20_000)
    assert others == gathered == [weight.shape for weight in table]
