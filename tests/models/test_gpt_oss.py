"""Directories of gpt-oss as they are published: MXFP4 files, and a template with `reasoning_effort`."""

import dataclasses
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from models.checkpoints import DATA, place, score
from safetensors.numpy import load_file, save_file
from small_families import changes_of, with_tokenizer
from small_run import small_config

from dapo_jax.config.sections import DataConfig
from dapo_jax.data.tokenizer import load_tokenizer
from dapo_jax.errors import InputError
from dapo_jax.export.export import export
from dapo_jax.models.hf_architecture import architecture_from_hf, read_architecture
from dapo_jax.models.load import load_params
from dapo_jax.models.mxfp4 import decoded
from dapo_jax.models.rope_scaling import YarnRopeScaling
from dapo_jax.models.weights import init_params, weight_table
from dapo_jax.models.write_safetensors import write_safetensors
from dapo_jax.training.loop import train

QUANTIZED = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
MATRICES = "gate_up_proj", "down_proj"
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def packed(shape, seed):
    """Random blocks and scales of a tensor [E, K, N], and its numbers, one by one."""
    (experts, inner, columns), rng = shape, np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (experts, columns, inner // 32, 16), np.uint8)
    scales = rng.integers(118, 124, blocks.shape[:3], np.uint8)
    numbers = np.empty(shape, np.float32)
    for expert, k, n in np.ndindex(shape):
        byte = int(blocks[expert, n, k // 32, k % 32 // 2])
        code = byte >> 4 if k % 2 else byte & 15
        numbers[expert, k, n] = E2M1[code] * 2.0 ** (int(scales[expert, n, k // 32]) - 127)
    return blocks, scales, numbers


@pytest.fixture
def published(tmp_path):
    """A directory with experts in MXFP4, as OpenAI's are, and the same tensors in float32 by their names."""
    directory = tmp_path / "published"
    hf = json.loads((DATA / "gpt_oss" / "config.json").read_text())
    hf |= {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "layer_types": hf["layer_types"][:2]}
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(hf | QUANTIZED))
    arch = read_architecture(directory)
    write_safetensors(directory, weight_table(arch), init_params(arch, seed=3), dtype="float32")
    plain = load_file(directory / "model.safetensors")
    stored = dict(plain)
    for seed, name in enumerate(name for name in plain if name.endswith(MATRICES)):
        blocks, scales, plain[name] = packed(stored.pop(name).shape, seed)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(stored, directory / "model.safetensors")
    return directory, plain


def test_files_in_mxfp4_are_read_and_written_as_ordinary_tensors(published, tmp_path):
    directory, plain = published
    arch = read_architecture(directory)
    write_safetensors(tmp_path, weight_table(arch), load_params(directory, arch, place), dtype="bfloat16")
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == plain.keys()
    for name in plain:
        exact = name.endswith(MATRICES)  # of two bits of mantissa
        np.testing.assert_allclose(found[name].astype(np.float32), plain[name], rtol=0 if exact else 0.01, err_msg=name)


def test_numbers_in_mxfp4_are_those_of_transformers():
    """data of `convert_moe_packed_tensors`, which write_references.py recorded."""
    golden = np.load(Path(__file__).with_name("mxfp4.npz"))
    np.testing.assert_array_equal(decoded(golden["blocks"], golden["scales"]), golden["numbers"])
    nothing, no_number = np.zeros_like(golden["blocks"]), np.full_like(golden["scales"], 255)
    assert np.isnan(decoded(nothing, no_number)).all()


@pytest.mark.parametrize(
    ("end", "change", "message"),
    [
        ("_scales", lambda tensor: np.full_like(tensor, 255), "values of tensor .*gate_up_proj are NaN"),
        ("_scales", None, "gate_up_proj of shape .* is missing; .*gate_up_proj_blocks of shape .* is unknown"),
        ("_scales", lambda tensor: tensor[:, :-1], "gate_up_proj has shape .* expected"),
        ("_blocks", lambda tensor: tensor.astype(np.float32), "gate_up_proj has dtype F32"),
        ("_blocks", lambda tensor: tensor[..., :8].copy(), "gate_up_proj has shape .* expected"),
    ],
)
def test_damaged_files_in_mxfp4_are_refused(published, end, change, message):
    directory, _ = published
    stored = load_file(directory / "model.safetensors")
    name = f"model.layers.1.mlp.experts.gate_up_proj{end}"
    tensor = stored.pop(name)
    if change is not None:
        stored[name] = np.ascontiguousarray(change(tensor))
    save_file(stored, directory / "model.safetensors")
    with pytest.raises(InputError, match=message):
        load_params(directory, read_architecture(directory), place)


def test_weight_of_attention_goes_to_sinks():
    """Without them, the logits are others; with one that takes everything, tokens no longer see each other."""
    arch = read_architecture(DATA / "gpt_oss")
    params = load_params(DATA / "gpt_oss", arch, place)
    tokens = np.random.default_rng(0).integers(3, arch.vocab_size, (1, 24), np.int32)
    mask = np.ones(tokens.shape, bool)

    def logits(sink):
        return score(
            params | {"layers": params["layers"] | {"sink": np.full((4, 4), sink, np.float32)}}, tokens, mask, arch
        )

    other = tokens.copy()
    other[0, 0] = 3
    plain, all_to_sinks = logits(0.0), logits(1e4)
    np.testing.assert_array_equal(score(params, other, mask, arch)[:, 1:] != logits(1.0)[:, 1:], True)
    assert np.abs(plain - all_to_sinks).max() > 0.1
    tokens = other
    np.testing.assert_array_equal(logits(1e4)[:, 1:], all_to_sinks[:, 1:])


@pytest.mark.slow
def test_a_run_from_mxfp4_exports_what_transformers_loads(published, tmp_path):
    """One step of training; config.json loses what it said of the files."""
    directory, _ = published
    model = Path(with_tokenizer("gpt_oss", tmp_path))
    for name in ("config.json", "model.safetensors"):
        shutil.copy(directory / name, model / name)
    changes = {"trainer.total_training_steps": 1, "trainer.save_freq": 1}
    config = small_config(tmp_path / "run", **changes_of(str(model), **changes))
    train(config)
    export(config, tmp_path / "out", dtype="bfloat16")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    arch = read_architecture(tmp_path / "out")
    assert arch == read_architecture(model) and load_params(tmp_path / "out", arch, place)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert not [name for name in stored if name.endswith(("_blocks", "_scales"))]
    transformers, torch = (pytest.importorskip(name) for name in ("transformers", "torch"))
    peer, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    tokens = np.random.default_rng(0).integers(3, arch.vocab_size, (1, 40), np.int32)
    ours = score(load_params(tmp_path / "out", arch, place), tokens, np.ones(tokens.shape, bool), arch)
    with torch.no_grad():
        theirs = peer(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


def test_the_templates_reasoning_effort_is_an_option_and_has_the_templates_default(tmp_path):
    model = Path(with_tokenizer("gpt_oss", tmp_path))
    (model / "chat_template.jinja").write_text(
        "{%- if reasoning_effort is not defined %}{%- set reasoning_effort = 'medium' %}{%- endif %}"
        "{{- '<Reasoning: ' + reasoning_effort + '>' }}"
        "{%- for message in messages %}{{- message.role + ':' + message.content }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- 'assistant:' }}{%- endif %}"
    )
    tokenizer = load_tokenizer(model)

    def text(**options):
        (prompt,) = tokenizer.encode_prompts([[{"role": "user", "content": "1+2="}]], DataConfig(**options))
        return tokenizer.decode(prompt)

    assert text() == text(chat_template_kwargs='{"reasoning_effort": "medium"}')
    assert text(chat_template_kwargs='{"reasoning_effort": "high"}') == text().replace("medium", "high")


def test_other_activations_of_experts_are_a_matter_of_the_config():
    hf = json.loads((DATA / "gpt_oss" / "config.json").read_text())
    changed = architecture_from_hf(hf | {"swiglu_limit": 5.0, "swiglu_alpha": 1.5})
    assert (changed.experts.clamp, changed.experts.slope) == (5.0, 1.5)
    published = {key: value for key, value in hf.items() if not key.startswith("swiglu")}
    assert architecture_from_hf(published) == architecture_from_hf(hf)
    assert dataclasses.replace(changed, experts=architecture_from_hf(hf).experts) == architecture_from_hf(hf)


def test_a_config_that_says_nothing_of_scaled_positions_means_those_of_the_published_models():
    """As transformers 5.24 reads it; an empty `rope_parameters` says that there is no scaling."""
    hf = json.loads((DATA / "gpt_oss" / "config.json").read_text())
    del hf["rope_parameters"]
    scaling = architecture_from_hf(hf).rope_scaling
    assert scaling == YarnRopeScaling(32.0, 4096, attention_factor=0.1 * math.log(32) + 1, truncate=False)
    assert architecture_from_hf(hf | {"rope_scaling": None, "rope_theta": 7.0}).rope_scaling == scaling
    assert architecture_from_hf(hf | {"rope_parameters": {}}).rope_scaling is None
