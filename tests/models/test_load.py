from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.models.load import is_gguf, load_params, read_model_architecture

DATA = Path(__file__).parent / "data"


def test_a_directory_is_read_as_a_hugging_face_model():
    path = str(DATA / "llama_tied")
    assert not is_gguf(path)
    arch = read_model_architecture(path)
    params = load_params(path, arch, lambda weight, array: jnp.asarray(array))
    assert arch.family == "llama"
    assert params["layers"]["query"].shape == (3, 48, 4, 16)


def test_a_gguf_file_is_read_as_one(tmp_path):
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "mamba")
    writer.add_tensor("token_embd.weight", np.ones((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert is_gguf(path)
    with pytest.raises(ValueError, match="general.architecture='mamba'"):
        read_model_architecture(path)


@pytest.mark.parametrize("name", ["absent", "absent.gguf", "model.bin"])
def test_anything_else_is_an_error_that_says_what_is_accepted(tmp_path, name):
    (tmp_path / "model.bin").write_bytes(b"weights")
    message = f"the model path .*{name} .*: give a Hugging Face model directory or a .gguf file"
    with pytest.raises(ValueError, match=message):
        read_model_architecture(tmp_path / name)
    arch = read_model_architecture(DATA / "llama_tied")
    with pytest.raises(ValueError, match=message):
        load_params(tmp_path / name, arch, lambda weight, array: array)
