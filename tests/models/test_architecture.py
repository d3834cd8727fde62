import dataclasses
import json
from pathlib import Path

import pytest

from dapo_jax.models.families import FAMILIES
from dapo_jax.models.hf_architecture import architecture_from_hf, read_architecture, text_part
from dapo_jax.models.rope_scaling import YarnRopeScaling
from dapo_jax.models.write_safetensors import with_weights

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
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
SOME_FULL = ["full_attention" if layer in (1, 4) else "sliding_attention" for layer in range(7)]
GELU = {"hidden_activation": "gelu_pytorch_tanh"}


def test_absent_and_null_settings_take_the_defaults():
    arch = architecture_from_hf(LLAMA | {"num_key_value_heads": None, "head_dim": None, "rope_scaling": None})
    assert (arch.num_kv_heads, arch.head_dim, arch.rope_theta, arch.rope_scaling) == (4, 12, 1e4, None)
    assert not arch.tie_embeddings


@pytest.mark.parametrize(
    ("change", "message"), json.loads(Path(__file__).with_name("refused_configs.json").read_text())
)
def test_what_is_not_supported_is_an_error(change, message):
    with pytest.raises(ValueError, match=message):
        architecture_from_hf(text_part(LLAMA | change))


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_sequence_classification_model_differs_by_its_scalar_head_alone(family):
    config = {name: value for name, value in LLAMA.items() if name != "hidden_act"} | {"num_hidden_layers": 4}
    language, scoring = (
        f"{family.hf_name}ForCausalLM",
        f"{family.reward_name or family.hf_name}ForSequenceClassification",
    )
    language = architecture_from_hf(config | {"architectures": [language]})  # with any labels
    scoring = architecture_from_hf(config | ONE_LABEL | {"architectures": [scoring]})
    assert not language.scalar_head
    assert scoring == dataclasses.replace(language, scalar_head=True)


def of_family(name, **changes):
    return architecture_from_hf(LLAMA | {"num_hidden_layers": 7, "architectures": [f"{name}ForCausalLM"]} | changes)


OTHERS = {  # keys that families with experts read, and values that change what these describe
    **{"n_shared_experts": 2, "routed_scaling_factor": 2.5, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4},
    **{"shared_expert_intermediate_size": 0, "swiglu_limit": None, "swiglu_alpha": None, "n_routed_experts": 64},
    **{"decoder_sparse_step": 2, "mlp_only_layers": [0], "moe_intermediate_size": 8, "use_qk_norm": True},
    "norm_topk_prob": True,
}


@pytest.mark.parametrize("name", ["Llama", "Qwen3Moe", "Qwen3_5Moe", "GptOss", "Glm4Moe"])
def test_keys_of_experts_of_other_families_change_nothing(name):
    """As in transformers; Qwen3-Coder-30B-A3B has shared_expert_intermediate_size: 0."""
    own = next(family.defaults for family in FAMILIES.values() if family.hf_name == name)
    others = {key: value for key, value in OTHERS.items() if key not in own}
    assert of_family(name, **others) == of_family(name, **dict.fromkeys(others)) == of_family(name)


def test_half_of_a_head_of_glm_carries_positions_unless_its_config_says_otherwise():
    config = LLAMA | {"architectures": ["Glm4MoeForCausalLM"]}
    assert architecture_from_hf(config).rotary_size == 6  # of 12
    whole = architecture_from_hf(config | {"partial_rotary_factor": 1.0})
    assert whole.rotary_size == 0 and architecture_from_hf(with_weights(config, whole, "float32")) == whole


@pytest.mark.parametrize(
    ("config", "full"),
    [
        ({"name": "Mistral", "sliding_window": 8}, []),
        ({"name": "Mistral", "sliding_window": None}, range(7)),
        ({"name": "Mistral", "sliding_window": 8, "layer_types": SOME_FULL}, [1, 4]),
        ({"name": "Qwen2", "sliding_window": 8, "use_sliding_window": False, "max_window_layers": 0}, range(7)),
        ({"name": "Qwen2", "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 5}, range(5)),
        ({"name": "Qwen3", "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}, []),
        ({"name": "Gemma2", "sliding_window": 8}, [1, 3, 5]),
        ({"name": "Gemma3", "sliding_window": 8}, [5]),
        ({"name": "Gemma3", "sliding_window": 8, "sliding_window_pattern": 2}, [1, 3, 5]),
        ({"name": "Gemma3", "sliding_window": 8, "_sliding_window_pattern": 2}, [5]),
        ({"name": "Gemma2", "sliding_window": 8, "sliding_window_pattern": 3}, [1, 3, 5]),
        ({"name": "Gemma3", "sliding_window": 8, "layer_types": ["full_attention"] * 7}, range(7)),
        ({"name": "Olmo3", "sliding_window": 8}, [3]),
        ({"name": "GptOss", "sliding_window": 8}, [1, 3, 5]),
        ({"name": "Olmo2"}, range(7)),
    ],
)
def test_which_layers_have_a_window(config, full):
    activation = GELU if "Gemma" in config["name"] else {}
    layers = of_family(**config, **activation).layers
    assert [layer.window for layer in layers] == [None if i in full else 8 for i in range(7)]


def test_layers_with_a_window_have_a_rotary_embedding_of_their_own():
    gemma = of_family("Gemma3", **GELU, rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert (gemma.rope_theta, gemma.rope_scaling.factor) == (1e6, 8.0)
    assert {layer.theta for layer in gemma.layers if layer.window} == {1e4}
    assert {layer.theta for layer in gemma.layers if not layer.window} == {None}
    olmo = of_family("Olmo3", rope_theta=5e5, rope_scaling=YARN)
    assert {layer.theta for layer in olmo.layers if layer.window} == {5e5}, "YaRN is for the others alone"
    assert {layer.theta for layer in of_family("Olmo3", rope_theta=5e5).layers} == {None}


def test_a_window_without_a_size_has_the_size_of_hugging_faces_default():
    assert {layer.window for layer in of_family("Mistral").layers} == {4096}
    assert {layer.window for layer in of_family("Qwen2", use_sliding_window=True, max_window_layers=0).layers} == {4096}


def test_an_entry_that_rope_parameters_lacks_is_that_of_the_top_level_or_the_default():
    full, windows = {"full_attention": {"rope_theta": 5e4}}, {"sliding_attention": {"rope_theta": 5e4}}

    def thetas(name, **changes):
        arch = of_family(name, **(GELU if name == "Gemma3" else {}), **changes)
        return arch.rope_theta, {layer.theta or arch.rope_theta for layer in arch.layers if layer.window}

    assert thetas("Gemma3", rope_parameters=full) == (5e4, {1e4})
    assert thetas("Gemma3", rope_parameters=full, rope_local_base_freq=2e3) == (5e4, {2e3})
    assert thetas("Gemma3", rope_parameters=windows) == (1e6, {5e4})
    assert thetas("Gemma3", rope_parameters=windows, rope_theta=3e5) == (3e5, {5e4})
    assert thetas("Olmo3", rope_parameters=full) == (5e4, {5e5})
    assert thetas("Olmo3") == (5e5, {5e5})


def test_the_original_length_may_be_at_the_top_level():
    for rope in (YARN, LLAMA3_SCALING):
        rest = {key: value for key, value in rope.items() if key != "original_max_position_embeddings"}
        above = {"original_max_position_embeddings": rope["original_max_position_embeddings"]}
        longer = {"max_position_embeddings": 512, "rope_scaling": rope}
        assert of_family("Llama", **longer) == of_family("Llama", **longer, **above)
        assert of_family("Llama", **longer) == of_family("Llama", **{**longer, "rope_scaling": rest}, **above)


def test_every_fourth_layer_of_smollm3_has_no_rotary_embedding():
    assert [layer.rotary for layer in of_family("SmolLM3").layers] == [True, True, True, False, True, True, True]
    listed = of_family("SmolLM3", no_rope_layers=[0, 1, 1, 1, 1, 1, 0])
    assert [layer.rotary for layer in listed.layers] == [False, True, True, True, True, True, False]


def test_which_layers_have_experts():
    moe = of_family("Qwen3Moe", decoder_sparse_step=2, mlp_only_layers=[3])
    assert [layer.experts for layer in moe.layers] == [False, True, False, False, False, True, False]
    assert (moe.layers_with("expert_gate"), moe.layers_with("gate")) == ((1, 5), (0, 2, 3, 4, 6))
    assert moe.layers_with("query") == tuple(range(7))


def test_yarn_grows_with_the_factor_unless_the_config_says_how():
    scaling = of_family("Qwen3", rope_scaling=YARN).rope_scaling
    assert scaling == YarnRopeScaling(4.0, 32, attention_factor=pytest.approx(1.138629))
    assert of_family("Qwen3", rope_scaling=YARN | {"attention_factor": 1.5}).rope_scaling.attention_factor == 1.5
    both = {"mscale": 2.0, "mscale_all_dim": 1.0}
    assert of_family("Qwen3", rope_scaling=YARN | both).rope_scaling.attention_factor == pytest.approx(
        1.277259 / 1.138629
    )
    shorter = {"rope_type": "yarn", "factor": 4.0}
    old = of_family("Qwen3", rope_scaling=shorter, max_position_embeddings=64).rope_scaling
    assert old.original_max_position_embeddings == 64


def test_missing_or_damaged_config_json_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="config.json does not exist"):
        read_architecture(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA)[:-5])
    with pytest.raises(ValueError, match="config.json is damaged or incomplete"):
        read_architecture(tmp_path)
