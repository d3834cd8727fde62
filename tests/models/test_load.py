from pathlib import Path

import pytest

from dapo_jax.models.load import context_length, load_params, read_model_architecture

LLAMA = Path(__file__).parent / "data" / "llama_tied"


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
    for read in (
        read_model_architecture,
        context_length,
        lambda path: load_params(path, read_model_architecture(LLAMA), None),
    ):
        with pytest.raises(ValueError, match=f"the model path .*{name} {told}"):
            read(tmp_path / name)


def test_a_directory_may_be_called_like_a_gguf_file(tmp_path):
    (tmp_path / "a.gguf").symlink_to(LLAMA)
    assert read_model_architecture(tmp_path / "a.gguf") == read_model_architecture(LLAMA)
