"""Host: the Hugging Face config.json of an architecture."""

from collections.abc import Mapping, Sequence
from typing import Any

from dapo_jax.models.architecture import Architecture
from dapo_jax.models.families import FAMILIES, Family
from dapo_jax.models.hf_architecture import ACTIVATIONS, FULL, SLIDING, activation_key
from dapo_jax.models.rope_scaling import hf_scaling

STALE = (  # keys of a model's own config that do not hold for weights of ours, besides those of `_of_weights`
    *("quantization_config", "auto_map", "original_max_position_embeddings", "partial_rotary_factor"),
)


def hf_config(
    arch: Architecture,
    *,
    dtype: str,
    eos_ids: Sequence[int],
    pad_id: int,
    bos_id: int | None,
    max_position_embeddings: int,
) -> dict[str, Any]:
    """The config that `architecture_from_hf` reads as `arch`, and transformers 4 and 5 and vLLM likewise."""
    family = FAMILIES[arch.family]
    assert all(getattr(arch, name) == value for name, value in family.traits.items()), f"{arch} is not of its family"
    config = {
        "architectures": [family.architecture_name(arch.scalar_head)],
        "model_type": arch.family,
        **_of_weights(arch, family, dtype),
        "vocab_size": arch.vocab_size,
        "hidden_size": arch.hidden_size,
        "intermediate_size": arch.intermediate_size,
        "num_hidden_layers": arch.num_layers,
        "num_attention_heads": arch.num_heads,
        "num_key_value_heads": arch.num_kv_heads,
        "head_dim": arch.head_dim,
        "rms_norm_eps": arch.rms_norm_eps,
        "max_position_embeddings": max_position_embeddings,
        "initializer_range": arch.initializer_range,
        "bos_token_id": bos_id,
        "eos_token_id": one_or_all(eos_ids),
        "pad_token_id": pad_id,
        **_layers(arch, family),
        **_of_family(arch, family),
    }
    if arch.scalar_head:
        config["id2label"] = {"0": "LABEL_0"}
    return config


def with_weights(config: Mapping[str, Any], arch: Architecture, dtype: str) -> dict[str, Any]:
    """A Hugging Face config that was read as `arch`, for weights of ours in `dtype`; see `hf_config`."""
    kept = {key: value for key, value in config.items() if key not in STALE}
    return kept | _of_weights(arch, FAMILIES[arch.family], dtype)


def _of_weights(arch: Architecture, family: Family, dtype: str) -> dict[str, Any]:
    """The keys that depend on who wrote the weights: each in the spelling of transformers 4 and vLLM, and of 5."""
    scaling = None if arch.rope_scaling is None else hf_scaling(arch.rope_scaling)
    rope = {"rope_theta": arch.rope_theta, **(scaling or {"rope_type": "default"})}
    config = {
        "torch_dtype": dtype,
        "dtype": dtype,
        "tie_word_embeddings": arch.tie_embeddings,
        "rope_theta": arch.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": rope,
    }
    if family.local_theta:
        thetas = [kind.theta for kind in arch.pattern if kind.window is not None]
        local = next((theta for theta in thetas if theta is not None), arch.rope_theta)
        config["rope_parameters"] = {FULL: rope, SLIDING: {"rope_theta": local, "rope_type": "default"}}
        config |= {} if family.local_theta == "rope_theta" else {family.local_theta: local}
    if arch.experts is not None:
        config |= dict.fromkeys(("num_experts", "num_local_experts"), arch.experts.number)
    return config


def _layers(arch: Architecture, family: Family) -> dict[str, Any]:
    """The keys that say what sets layers apart."""
    config: dict[str, Any] = {}
    if family.window != "never":
        default = family.defaults["sliding_window"] if family.window == "typed" else None  # these must name a window
        config["sliding_window"] = arch.window or default
    if family.window == "switched":
        config["use_sliding_window"] = arch.window is not None
    if family.window in ("switched", "typed") or len({kind.window for kind in arch.pattern}) > 1:
        config["layer_types"] = [FULL if kind.window is None else SLIDING for kind in arch.layers]
    if family.leaves_out_rotary:
        config["no_rope_layers"] = [int(kind.rotary) for kind in arch.layers]
    if arch.experts is not None:
        config |= {
            "num_experts_per_tok": arch.experts.per_token,
            "moe_intermediate_size": arch.experts.intermediate_size,
            "norm_topk_prob": arch.experts.normalized,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [number for number, kind in enumerate(arch.layers) if not kind.experts],
        }
    return config


def _of_family(arch: Architecture, family: Family) -> dict[str, Any]:
    """The keys that only some families have."""
    config: dict[str, Any] = {
        activation_key(family): next(hf for hf, ours in ACTIVATIONS.items() if ours == arch.activation)
    }
    config |= {"attention_bias": arch.output_bias} if "attention_bias" in family.biases else {}
    config |= {"mlp_bias": arch.mlp_bias} if "mlp_bias" in family.biases else {}
    if "query_pre_attn_scalar" in family.defaults:
        config["query_pre_attn_scalar"] = round(arch.head_dim / arch.query_scale**2)
        config |= {"attn_logit_softcapping": arch.attention_cap, "final_logit_softcapping": arch.logit_cap}
    return config


def one_or_all(eos_ids: Sequence[int]) -> int | list[int]:
    """As Hugging Face writes eos_token_id: a number, or a list of several."""
    return eos_ids[0] if len(eos_ids) == 1 else list(eos_ids)
