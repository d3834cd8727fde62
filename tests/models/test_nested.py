"""The text part of models that also take images, and layers that predict tokens after the next, which are not read."""

import json
import logging
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from models.checkpoints import DATA, expected_logits, place, score, tolerance
from safetensors.numpy import load_file, save_file
from small_families import changes_of, with_tokenizer
from small_run import small_config

from dapo_jax.config.sections import DataConfig
from dapo_jax.data.tokenizer import load_tokenizer
from dapo_jax.errors import InputError
from dapo_jax.export.export import export
from dapo_jax.models.hf_architecture import architecture_from_hf, context_length, described, read_architecture
from dapo_jax.models.load import load_params
from dapo_jax.models.weights import weight_table
from dapo_jax.models.write_safetensors import with_weights, write_safetensors
from dapo_jax.training.loop import train

NESTED = Path(__file__).parent / "nested" / "gemma3"
FAMILIES = {  # directory: tensors that are not read, the family of the rest
    NESTED: (34, "gemma3_text"),
    NESTED.with_name("qwen3_5"): (21, "qwen3_5_text"),
}
GLM = DATA / "glm4_moe"


def assert_golden_logits(directory, golden):
    arch = read_architecture(directory)
    rows = np.load(golden / "reference.npz")
    mask = rows["attention_mask"].astype(bool)
    found = np.asarray(score(load_params(directory, arch, place), rows["input_ids"].astype(np.int32), mask, arch))
    np.testing.assert_allclose(found[mask], expected_logits(golden)[mask], rtol=0, atol=tolerance(golden))


@pytest.mark.parametrize("nested", FAMILIES, ids=lambda nested: nested.name)
def test_the_text_part_gives_the_logits_of_transformers_and_images_are_counted_in_one_line(nested, caplog):
    caplog.set_level(logging.INFO)
    count, family = FAMILIES[nested]
    assert_golden_logits(nested, nested)
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        f"{count} tensors of images are not read"
    ]
    assert context_length(nested) == 512 and read_architecture(nested).family == family


@pytest.mark.parametrize("nested", FAMILIES, ids=lambda nested: nested.name)
def test_an_export_is_a_language_model_of_its_own(nested, tmp_path):
    arch = read_architecture(nested)
    (tmp_path / "config.json").write_text(json.dumps(with_weights(described(nested), arch, "float32")))
    write_safetensors(tmp_path, weight_table(arch), load_params(nested, arch, place), dtype="float32")
    text = f"{'Gemma3' if nested == NESTED else 'Qwen3_5'}ForCausalLM"
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [text]
    assert read_architecture(tmp_path) == arch
    assert_golden_logits(tmp_path, nested)


def test_the_text_part_of_a_published_config_needs_what_it_leaves_out():
    """gemma-3-4b-it names these alone."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    text |= {"model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    arch = architecture_from_hf({**text, "architectures": ["Gemma3ForCausalLM"]})
    assert (arch.num_heads, arch.num_kv_heads, arch.head_dim, arch.vocab_size) == (8, 4, 256, 262208)
    assert len(arch.pattern) == 6 and not arch.first and arch.tie_embeddings


def test_unknown_tensors_of_such_a_model_are_refused_still_and_so_are_other_models_with_images(tmp_path):
    shutil.copytree(NESTED, tmp_path / "more")
    tensors = load_file(NESTED / "model.safetensors")
    save_file(tensors | {"audio_tower.weight": np.zeros(3, np.float32)}, tmp_path / "more" / "model.safetensors")
    with pytest.raises(InputError, match="tensor audio_tower.weight of shape .* is unknown"):
        load_params(tmp_path / "more", read_architecture(NESTED), place)
    with pytest.raises(InputError, match="or Gemma3ForConditionalGeneration, Qwen3_5.*, of which the text part"):
        architecture_from_hf({"architectures": ["LlavaForConditionalGeneration"], "text_config": {}})


def test_layers_that_predict_tokens_after_the_next_are_left_out_and_the_bias_of_routers_stays_float32(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    shutil.copytree(GLM, tmp_path / "glm")
    tensors = load_file(GLM / "model.safetensors")
    further = {f"model.layers.4.{name}": np.zeros(3, np.float32) for name in ("enorm.weight", "eh_proj.weight")}
    save_file(tensors | further, tmp_path / "glm" / "model.safetensors")
    assert_golden_logits(tmp_path / "glm", GLM)
    assert "2 tensors of layers that predict tokens after the next are not read" in caplog.text
    save_file(tensors | {"model.layers.5.enorm.weight": further["model.layers.4.enorm.weight"]}, tmp_path / "x")
    (tmp_path / "x").rename(tmp_path / "glm" / "model.safetensors")
    arch = read_architecture(GLM)
    with pytest.raises(InputError, match="tensor model.layers.5.enorm.weight of shape"):
        load_params(tmp_path / "glm", arch, place)
    write_safetensors(tmp_path, weight_table(arch), load_params(GLM, arch, place), dtype="bfloat16")
    stored = load_file(tmp_path / "model.safetensors")
    kept = [name for name, tensor in stored.items() if tensor.dtype == np.float32]
    assert kept == [f"model.layers.{i}.mlp.gate.e_score_correction_bias" for i in (1, 2, 3)]
    assert with_weights(described(GLM), arch, "bfloat16")["num_nextn_predict_layers"] == 0


@pytest.mark.slow
def test_a_run_trains_the_text_part_and_its_export_is_a_language_model(tmp_path):
    model = with_tokenizer("../nested/gemma3", tmp_path)
    changes = changes_of(model, **{"trainer.total_training_steps": 1, "trainer.save_freq": 1, "model.lora.rank": 2})
    config = small_config(tmp_path / "run", **changes)
    train(config)
    export(config, tmp_path / "out", dtype="float32")
    arch = read_architecture(tmp_path / "out")
    assert arch == read_architecture(NESTED) and load_params(tmp_path / "out", arch, place)
    with pytest.raises(InputError, match="--adapter: PEFT would look for the adapters of the text part"):
        export(config, tmp_path / "adapters", adapter=True)


def test_a_prompt_with_a_token_of_images_is_refused(tmp_path):
    model = Path(with_tokenizer("../nested/gemma3", tmp_path))
    hf = json.loads((model / "config.json").read_text())
    five = load_tokenizer(model).encode("5")[0]
    (model / "config.json").write_text(json.dumps(hf | {"image_token_index": five}))
    tokenizer = load_tokenizer(model)
    assert tokenizer.encode_prompts(["3 + 4 ="], DataConfig())
    with pytest.raises(InputError, match="a prompt has 5, a token of images, but only the text part"):
        tokenizer.encode_prompts(["3 + 4 =", "3 + 5 ="], DataConfig())


@pytest.mark.parametrize("name", ["qwen3_5_moe", "qwen3_moe"])
def test_experts_of_a_layer_may_lie_in_one_tensor(name, tmp_path):
    """As in Qwen3.5's files; next to layers that predict tokens after the next."""
    shutil.copytree(DATA / name, tmp_path / "joined")
    tensors, arch = load_file(DATA / name / "model.safetensors"), read_architecture(DATA / name)
    for stem in {key.partition(".experts.")[0] + ".experts" for key in tensors if ".experts." in key}:
        gate, up, down = (
            np.stack([tensors.pop(f"{stem}.{number}.{part}_proj.weight") for number in range(arch.experts.number)])
            for part in ("gate", "up", "down")
        )
        tensors |= {f"{stem}.gate_up_proj": np.concatenate([gate, up], axis=1), f"{stem}.down_proj": down}
    tensors |= {"mtp.fc.weight": np.zeros(3, np.float32)} if arch.delta else {}
    save_file(tensors, tmp_path / "joined" / "model.safetensors")
    found, expected = (load_params(path, arch, place) for path in (tmp_path / "joined", DATA / name))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    stem = next(key for key in tensors if key.endswith("gate_up_proj"))
    save_file(tensors | {stem: tensors[stem][1:]}, tmp_path / "joined" / "model.safetensors")
    with pytest.raises(InputError, match=r"experts\.0\.gate_proj\.weight of shape .* is missing"):
        load_params(tmp_path / "joined", arch, place)
