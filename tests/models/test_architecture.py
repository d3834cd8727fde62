import dataclasses
import json
from pathlib import Path

import pytest

from dapo_jax.models.architecture import Llama3RopeScaling, architecture_from_hf, read_architecture
from dapo_jax.models.families import FAMILIES

DATA = Path(__file__).parent / "data"
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-5,
}
ONE_LABEL = {"id2label": {"0": "LABEL_0"}}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_sizes_are_read_from_config_json():
    arch = read_architecture(DATA / "qwen3_qknorm")
    sizes = (arch.vocab_size, arch.hidden_size, arch.intermediate_size, arch.num_layers)
    assert sizes == (160, 48, 80, 3)
    assert (arch.num_heads, arch.num_kv_heads, arch.head_dim) == (4, 2, 24)
    assert (arch.rope_theta, arch.rms_norm_eps, arch.initializer_range) == (1e6, 1e-5, 0.2)


@pytest.mark.parametrize(
    ("name", "family", "tied", "bias", "norm"),
    [
        ("llama_tied", "llama", True, False, False),
        ("llama3_rope_scaled", "llama", False, False, False),
        ("qwen2_bias_tied", "qwen2", True, True, False),
        ("qwen3_qknorm", "qwen3", False, False, True),
    ],
)
def test_families_differ_in_bias_and_norm(name, family, tied, bias, norm):
    arch = read_architecture(DATA / name)
    assert (arch.family, arch.tie_embeddings, arch.qkv_bias, arch.qk_norm) == (family, tied, bias, norm)


def test_both_spellings_of_rope_settings_agree():
    old = architecture_from_hf(LLAMA | {"rope_theta": 5e5, "rope_scaling": LLAMA3_SCALING})
    new = architecture_from_hf(LLAMA | {"rope_parameters": LLAMA3_SCALING | {"rope_theta": 5e5}})
    assert old == new
    assert old.rope_theta == 5e5
    assert old.rope_scaling == Llama3RopeScaling(8.0, 1.0, 4.0, 64)


def test_absent_and_null_settings_take_the_defaults():
    arch = architecture_from_hf(LLAMA | {"num_key_value_heads": None, "head_dim": None, "rope_scaling": None})
    assert (arch.num_kv_heads, arch.head_dim, arch.rope_theta, arch.rope_scaling) == (4, 12, 1e4, None)
    assert not arch.tie_embeddings


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "Gemma.*choose one of.*Qwen3ForCausalLM"),
        ({"architectures": None}, "choose one of"),
        ({"architectures": ["LlamaForTokenClassification"]}, "choose one of.*Qwen3ForSequenceClassification"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias=true"),
        ({"mlp_bias": True}, "mlp_bias=true"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type='linear'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type='yarn'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "no low_freq_factor .*no high_freq"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 4096}, "sliding_window=4096"),
        ({"use_sliding_window": True, "sliding_window": 32}, "sliding_window=32"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types="),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 must be a multiple of num_key_value_heads=3"),
    ],
)
def test_what_is_not_supported_is_an_error(change, message):
    with pytest.raises(ValueError, match=message):
        architecture_from_hf(LLAMA | change)


@pytest.mark.parametrize("family", [family.hf_name for family in FAMILIES.values()])
def test_a_sequence_classification_model_differs_by_its_scalar_head_alone(family):
    language = architecture_from_hf(LLAMA | {"architectures": [f"{family}ForCausalLM"]})
    scoring = architecture_from_hf(LLAMA | ONE_LABEL | {"architectures": [f"{family}ForSequenceClassification"]})
    assert not language.scalar_head
    assert scoring == dataclasses.replace(language, scalar_head=True)


@pytest.mark.parametrize("labels", [{}, {"id2label": None}, {"id2label": {"0": "bad", "1": "good"}}])
def test_a_sequence_classification_model_has_one_label(labels):
    with pytest.raises(ValueError, match="LlamaForSequenceClassification with 2 labels: a reward model has one"):
        architecture_from_hf(LLAMA | labels | {"architectures": ["LlamaForSequenceClassification"]})


def test_a_language_model_may_have_any_labels():
    assert architecture_from_hf(LLAMA | {"id2label": {"0": "a", "1": "b"}}) == architecture_from_hf(LLAMA)


def test_all_problems_are_reported_together():
    with pytest.raises(ValueError, match="no vocab_size; no rms_norm_eps; .*gelu.*yarn"):
        config = {name: value for name, value in LLAMA.items() if name not in ("vocab_size", "rms_norm_eps")}
        architecture_from_hf(config | {"hidden_act": "gelu", "rope_parameters": {"rope_type": "yarn"}})


def test_a_window_that_is_switched_off_is_accepted():
    qwen2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False, "sliding_window": 32}
    assert architecture_from_hf(qwen2).qkv_bias


def test_missing_or_damaged_config_json_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="config.json does not exist"):
        read_architecture(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA)[:-5])
    with pytest.raises(ValueError, match="config.json is damaged or incomplete"):
        read_architecture(tmp_path)
