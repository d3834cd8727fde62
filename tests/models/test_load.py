from pathlib import Path

import pytest

from dapo_jax.models.load import is_gguf, load_params, read_model_architecture

LLAMA = Path(__file__).parent / "data" / "llama_tied"


def test_a_directory_is_read_as_a_hugging_face_model_and_a_gguf_file_as_one(tmp_path):
    assert not is_gguf(str(LLAMA)) and read_model_architecture(str(LLAMA)).family == "llama"
    pytest.importorskip("gguf")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert is_gguf(tmp_path / "model.gguf")
    for read in (read_model_architecture, lambda path: load_params(path, read_model_architecture(LLAMA), None)):
        with pytest.raises(ValueError, match="model.gguf is damaged .* GGUF header"):
            read(tmp_path / "model.gguf")


@pytest.mark.parametrize("name", ["absent", "absent.gguf", "model.bin"])
def test_anything_else_is_an_error_that_says_what_is_accepted(tmp_path, name):
    (tmp_path / "model.bin").write_bytes(b"weights")
    message = f"the model path .*{name} .*: give a Hugging Face model directory or a .gguf file"
    for read in (read_model_architecture, lambda path: load_params(path, read_model_architecture(LLAMA), None)):
        with pytest.raises(ValueError, match=message):
            read(tmp_path / name)
