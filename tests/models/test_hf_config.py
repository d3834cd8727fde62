import dataclasses
import json

import numpy as np
import pytest
import shapes
from models.checkpoints import DATA, place, score
from models.hf_configs import hf_config

from dapo_jax.models.architecture import Delta, Experts, Layer
from dapo_jax.models.families import FAMILIES
from dapo_jax.models.hf_architecture import architecture_from_hf, read_architecture
from dapo_jax.models.load import load_params
from dapo_jax.models.rope_scaling import LinearRopeScaling, Llama3RopeScaling, YarnRopeScaling
from dapo_jax.models.weights import init_params, weight_table
from dapo_jax.models.write_safetensors import with_weights, write_safetensors

SCALING = Llama3RopeScaling(8.0, 1.0, 4.0, 64)
EXPERTS = Experts(number=5, per_token=3, intermediate_size=24, normalized=True)
ALL, SOME, LOCAL = Layer(), Layer(window=24), Layer(window=24, theta=5000.0)


def architecture(family, **changes):
    """One in which no value is the default of Hugging Face or of `Architecture`, nor can be had from another."""
    sizes = {"vocab_size": 96, "intermediate_size": 72, "num_heads": 6, "rope_theta": 5000.0, "rms_norm_eps": 0.125}
    arch = dataclasses.replace(shapes.ARCH, family=family, **sizes, **FAMILIES[family].traits, initializer_range=0.25)
    if (fixed := FAMILIES[family].experts) is not None:
        arch = dataclasses.replace(arch, experts=dataclasses.replace(EXPERTS, **fixed), pattern=(Layer(experts=True),))
    if FAMILIES[family].delta:
        experts = arch.experts and dataclasses.replace(arch.experts, shared_size=40)
        kinds = tuple(Layer(experts=bool(experts), delta=one, rotary=not one) for one in (True, False))
        arch = dataclasses.replace(arch, experts=experts, pattern=kinds, delta=Delta(3, 6, 8, 20, 5))
    return dataclasses.replace(arch, **changes)


ARCHITECTURES = {
    **{family: architecture(family) for family in FAMILIES},
    "llama_tied": architecture("llama", tie_embeddings=True),
    "llama_scaled": architecture("llama", rope_scaling=SCALING),
    "llama_biases": architecture("llama", qkv_bias=True, output_bias=True, mlp_bias=True),
    "mistral_window": architecture("mistral", pattern=(SOME,)),
    "mistral_some": architecture("mistral", pattern=(ALL, SOME)),
    "qwen3_window": architecture("qwen3", pattern=(ALL, SOME), rope_scaling=LinearRopeScaling(2.0)),
    "qwen3_yarn": architecture("qwen3", rope_scaling=YarnRopeScaling(4.0, 32, 1.25, 16.0, 2.0, False)),
    "qwen3_moe_some": architecture("qwen3_moe", experts=EXPERTS, pattern=(ALL, Layer(experts=True))),
    "glm4_moe": architecture(
        "glm4_moe",
        num_layers=3,
        experts=dataclasses.replace(EXPERTS, scores="sigmoid", biased=True, scale=1.5, shared_size=48),
        first=(ALL,),
        pattern=(Layer(experts=True),),
        qkv_bias=True,
        qk_norm="head",
        rotary_size=4,
    ),
    "gpt_oss": architecture(
        "gpt_oss",
        intermediate_size=EXPERTS.intermediate_size,
        experts=dataclasses.replace(EXPERTS, biases=True, clamp=1.5, slope=2.0),
        pattern=(Layer(experts=True), Layer(window=24, experts=True)),
        rope_scaling=YarnRopeScaling(4.0, 32, 1.25, 16.0, 2.0, False),
    ),
    "smollm3_nope": architecture("smollm3", pattern=(ALL, Layer(rotary=False))),
    "olmo3_yarn": architecture("olmo3", pattern=(LOCAL, ALL), rope_scaling=YarnRopeScaling(4.0, 32, 1.25)),
    "gemma2_caps": architecture("gemma2", pattern=(SOME, ALL), attention_cap=20.0, logit_cap=10.0, query_scale=0.5),
    "gemma3_window": architecture("gemma3_text", pattern=(dataclasses.replace(LOCAL, theta=300.0), ALL)),
    "reward_model": architecture("qwen2", scalar_head=True),
}


def config_of(arch, **changes):
    return json.loads(json.dumps(hf_config(arch) | changes))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_config_describes_the_architecture_that_it_was_made_of(name):
    assert architecture_from_hf(config_of(ARCHITECTURES[name])) == ARCHITECTURES[name]


@pytest.mark.parametrize("path", sorted(DATA.iterdir()), ids=lambda path: path.name)
def test_a_config_for_weights_of_ours_says_the_same_in_both_spellings(path):
    arch, original = read_architecture(path), json.loads((path / "config.json").read_text())
    stale = {"quantization_config": {}, "auto_map": {}, "original_max_position_embeddings": None}
    found = with_weights(original | stale, arch, "bfloat16")
    assert not stale.keys() & found.keys()
    assert found["torch_dtype"] == found["dtype"] == "bfloat16"
    assert found["tie_word_embeddings"] == arch.tie_embeddings
    unchanged = original.keys() - {"torch_dtype", "dtype", "num_nextn_predict_layers"}
    assert {key: found[key] for key in unchanged} == {key: original[key] for key in unchanged}
    for spelling in (["rope_parameters"], ["rope_theta", "rope_scaling", "rope_local_base_freq"]):
        assert architecture_from_hf({key: value for key, value in found.items() if key not in spelling}) == arch
    if arch.experts is not None and not arch.experts.biased:
        assert found["num_experts"] == found["num_local_experts"] == arch.experts.number


LONGER = {"original_max_position_embeddings": 64}
IN_UNUSUAL_PLACES = [  # a checkpoint, what its config.json says instead, and what it lacks
    ("qwen3_yarn", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}, **LONGER}, ()),
    ("qwen3_yarn", {"rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_theta": 1e6, **LONGER}, ["rope_parameters"]),
    ("gemma3", {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 4.0}}}, ()),
    ("gemma3", {"rope_parameters": {"sliding_attention": {"rope_theta": 5e3}}, "rope_theta": 3e5}, ()),
    ("gemma3", {"_sliding_window_pattern": 2}, ["layer_types"]),
    ("gemma2_softcap", {"sliding_window_pattern": 3}, ["layer_types"]),
    ("olmo3", {}, ["rope_parameters"]),
    ("olmo3", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, ()),
    ("mistral_sliding", {"layer_types": ["full_attention", "sliding_attention"] * 2}, ()),
    ("llama_tied", {"hidden_activation": "gelu"}, ()),
]


@pytest.mark.parametrize(("name", "changes", "absent"), IN_UNUSUAL_PLACES)
def test_transformers_5_reads_the_same_where_config_json_says_it_in_an_unusual_place(tmp_path, name, changes, absent):
    transformers, torch = pytest.importorskip("transformers", minversion="5"), pytest.importorskip("torch")
    original = json.loads((DATA / name / "config.json").read_text())
    kept = {key: value for key, value in original.items() if key not in absent}
    (tmp_path / "config.json").write_text(json.dumps(kept | changes))
    (tmp_path / "model.safetensors").symlink_to(DATA / name / "model.safetensors")
    arch = read_architecture(tmp_path)
    tokens = np.random.default_rng(0).integers(3, arch.vocab_size, (1, 70), np.int32)
    ours = score(load_params(tmp_path, arch, place), tokens, np.ones_like(tokens, bool), arch)
    with torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        theirs = model(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", sorted(ARCHITECTURES.keys() - {"reward_model"}))
def test_transformers_computes_our_logits_from_the_config_and_the_weights(tmp_path, name):
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    arch = ARCHITECTURES[name]
    params = init_params(arch, seed=1)
    (tmp_path / "config.json").write_text(json.dumps(config_of(arch)))
    write_safetensors(tmp_path, weight_table(arch), params, dtype="float32")
    tokens = np.random.default_rng(0).integers(0, arch.vocab_size, (2, 90), np.int32)
    ours = np.asarray(score(params, tokens, np.ones_like(tokens, bool), arch))
    model, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    # Since 5 transformers calls a Mistral whose layers differ so.
    assert model.config.model_type in (arch.family, "ministral") and model.dtype == torch.float32
    assert (model.config.max_position_embeddings, model.config.bos_token_id) == (640, None)
    if arch.window is not None or not FAMILIES[arch.family].full_every:  # these always name a window
        assert getattr(model.config, "sliding_window", None) == arch.window
    with torch.no_grad():
        theirs = model(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
    assert np.abs(ours).max() > 1
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
