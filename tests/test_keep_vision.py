"""`--keep-vision`: a model that also takes images is written with its text part replaced, and nothing else."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from models.checkpoints import place
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from small_families import with_tokenizer
from small_run import small_config
from test_export import save_checkpoint

from dapo_jax.errors import InputError
from dapo_jax.export.export import export
from dapo_jax.models.hf_architecture import read_architecture
from dapo_jax.models.load import HEAD, VISION, load_params, text_name

MOE, PREFIX = "qwen3_5_moe", "model.language_model."
PROCESSOR, INDEX = "preprocessor_config.json", "model.safetensors.index.json"


def whole_model(name, folder):
    """A model that also takes images, in two files, of which the second has numbers of several widths."""
    model = Path(with_tokenizer(name if name == MOE else f"../nested/{name}", folder))
    tensors, raw = load_file(model / "model.safetensors"), json.loads((model / "config.json").read_text())
    if name == MOE:  # as published: nested, with the experts of a layer in one tensor
        raw = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": raw | {"dtype": "float32"}}
        for stem in {key.partition(".experts.")[0] + ".experts" for key in tensors if ".experts." in key}:
            parts = ("gate", "up", "down")
            gate, up, down = (
                np.stack([tensors.pop(f"{stem}.{i}.{part}_proj.weight") for i in range(6)]) for part in parts
            )
            tensors |= {f"{stem}.gate_up_proj": np.concatenate([gate, up], axis=1), f"{stem}.down_proj": down}
        tensors = {key.replace("model.", PREFIX, 1) if key != HEAD else key: one for key, one in tensors.items()}
        tensors["model.visual.norm.weight"] = np.ones(3, np.float32)
    embedding = next(key for key in tensors if key.endswith("embed_tokens.weight"))
    if name == "gemma3":
        tensors[f"language_model.{HEAD}"] = tensors[embedding]  # a tied head, stored a second time
    else:
        tensors["mtp.fc.weight"] = np.full((3, 1), 0.1, "bfloat16")
    odd = {f"{VISION[3]}odd": np.arange(3, dtype=np.uint8), f"{VISION[3]}narrow": np.ones(5, "bfloat16")}
    tensors |= odd
    (model / "model.safetensors").unlink()
    files = {f"model.safetensors-0000{i + 1}-of-00002.safetensors": sorted(tensors)[i::2] for i in range(2)}
    for file, names in files.items():
        save_file({key: tensors[key] for key in names}, model / file, metadata={"format": "pt"})
    weight_map = {key: file for file, names in files.items() for key in names}
    (model / INDEX).write_text(json.dumps({"metadata": {"total_size": 1, "more": 2}, "weight_map": weight_map}))
    (model / "config.json").write_text(json.dumps(raw))
    (model / PROCESSOR).write_text('{"size": 28}')
    return model


def others(path):
    """Tensors that are no text part's, in all files."""
    tensors = {name: one for file in path.glob("*.safetensors") for name, one in load_file(file).items()}
    return {name: one for name, one in tensors.items() if text_name(name).startswith(("mtp.", *VISION))}


def names_of(path):
    return {file.name: set(safe_open(file, "numpy").keys()) for file in path.glob("*.safetensors")}


def assert_aligned(file):
    """Each tensor begins at a multiple of its numbers' size, which torch needs."""
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    for name, entry in json.loads(raw[8 : 8 + length]).items():
        if name != "__metadata__":
            assert (8 + length + entry["data_offsets"][0]) % {"F32": 4, "BF16": 2, "U8": 1}[entry["dtype"]] == 0, name


@pytest.mark.short("gemma3", "moe")
@pytest.mark.parametrize("name", ["gemma3", "qwen3_5", MOE])
def test_an_export_replaces_the_text_part_alone(name, tmp_path):
    source = whole_model(name, tmp_path)
    config = small_config(tmp_path / "run", **{"model.path": str(source)})
    params = save_checkpoint(config)
    export(config, tmp_path / "out", keep_vision=True, dtype="float32" if name == MOE else "bfloat16")
    assert names_of(tmp_path / "out") == names_of(source)
    for file in (tmp_path / "out").glob("*.safetensors"):
        assert_aligned(file)
    kept, expected = others(tmp_path / "out"), others(source)
    assert kept.keys() == expected.keys() and len(kept) > 2
    for key, one in expected.items():
        assert kept[key].dtype == one.dtype and kept[key].tobytes() == one.tobytes(), key
    arch = read_architecture(source)
    assert read_architecture(tmp_path / "out") == arch
    found = load_params(tmp_path / "out", arch, place)
    if name != MOE:
        params = jax.tree.map(lambda leaf: leaf.astype("bfloat16").astype(np.float32), params)
    jax.tree.map(np.testing.assert_array_equal, found, params)
    raw, original = (json.loads((path / "config.json").read_text()) for path in (tmp_path / "out", source))
    assert raw == (original if name == MOE else original | {"dtype": "bfloat16"})
    assert (tmp_path / "out" / PROCESSOR).read_bytes() == (source / PROCESSOR).read_bytes()
    assert "pipeline_tag: image-text-to-text" in (tmp_path / "out" / "README.md").read_text()
    index, given = (json.loads((path / INDEX).read_text()) for path in (tmp_path / "out", source))
    sizes = [one.nbytes for file in (tmp_path / "out").glob("*.safetensors") for one in load_file(file).values()]
    assert index == given | {"metadata": {"total_size": sum(sizes), "more": 2}}


def test_a_text_part_trained_by_runs_one_after_the_other_or_with_adapters_is_put_back(tmp_path):
    source = whole_model("gemma3", tmp_path)
    first = small_config(tmp_path / "first", **{"model.path": str(source)})
    save_checkpoint(first)
    lora = {"model.lora.rank": 2, "model.lora.target_modules": ("all-linear",)}
    second = small_config(tmp_path / "second", **{"model.path": str(tmp_path / "first")}, **lora)
    save_checkpoint(second)
    export(second, tmp_path / "whole", dtype="float32", keep_vision=True)
    export(second, tmp_path / "text", dtype="float32")
    arch = read_architecture(tmp_path / "text")
    whole, text = (load_params(tmp_path / one, arch, place) for one in ("whole", "text"))
    jax.tree.map(np.testing.assert_array_equal, whole, text)
    assert others(tmp_path / "whole").keys() == others(source).keys()
    with pytest.raises(InputError, match="--adapter and --keep-vision exclude each other"):
        export(second, tmp_path / "none", adapter=True, keep_vision=True)
    raw = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(raw | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(InputError, match=f"{source}/config.json: .*quant_method='fp8': quantized weights are not read"):
        export(second, tmp_path / "none", keep_vision=True)
    source.rename(tmp_path / "elsewhere")
    with pytest.raises(InputError, match=f"{source} does not exist"):
        export(second, tmp_path / "none", keep_vision=True)


def test_a_run_of_a_language_model_has_no_vision_to_keep(tmp_path):
    random = small_config(tmp_path / "run")
    save_checkpoint(random)
    with pytest.raises(InputError, match="--keep-vision: a random model has no part for images: leave it out"):
        export(random, tmp_path / "none", keep_vision=True)
    model = with_tokenizer("qwen3_qknorm", tmp_path)
    save_checkpoint(config := small_config(tmp_path / "other", **{"model.path": model}))
    with pytest.raises(InputError, match=f"--keep-vision: {model} has no part for images"):
        export(config, tmp_path / "none", keep_vision=True)
    assert not (tmp_path / "none").exists()
