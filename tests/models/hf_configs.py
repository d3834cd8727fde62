"""The config.json of an architecture, as Hugging Face writes it."""

from dapo_jax.models.families import FAMILIES
from dapo_jax.models.hf_architecture import ACTIVATIONS, DELTA, FULL, LINEAR, SLIDING, activation_key
from dapo_jax.models.write_safetensors import with_weights


def hf_config(arch, *, eos_id=3):
    """The config that `architecture_from_hf` reads as `arch`, and transformers 4 and 5 likewise."""
    family = FAMILIES[arch.family]
    assert all(getattr(arch, name) == value for name, value in family.traits.items()), f"{arch} is not of its family"
    config = {
        "architectures": [family.architecture_name(arch.scalar_head)],
        "model_type": arch.family,
        "vocab_size": arch.vocab_size,
        "hidden_size": arch.hidden_size,
        "intermediate_size": arch.intermediate_size,
        "num_hidden_layers": arch.num_layers,
        "num_attention_heads": arch.num_heads,
        "num_key_value_heads": arch.num_kv_heads,
        "head_dim": arch.head_dim,
        "rms_norm_eps": arch.rms_norm_eps,
        "max_position_embeddings": 640,
        "initializer_range": arch.initializer_range,
        "bos_token_id": None,
        "eos_token_id": eos_id,
        "pad_token_id": 0,
        **_layers(arch, family),
        **_of_family(arch, family),
        **({"id2label": {"0": "LABEL_0"}} if arch.scalar_head else {}),
    }
    return with_weights(config, arch, "float32")


def _layers(arch, family):
    """The keys that say what sets layers apart."""
    config = {}
    if family.window != "never":
        default = family.defaults["sliding_window"] if family.window == "typed" else None  # these must name a window
        config["sliding_window"] = arch.window or default
    if family.window == "switched":
        config["use_sliding_window"] = arch.window is not None
    if family.window in ("switched", "typed") or len({kind.window for kind in arch.kinds}) > 1:
        config["layer_types"] = [FULL if kind.window is None else SLIDING for kind in arch.layers]
    if arch.delta is not None:
        config["layer_types"] = [LINEAR if kind.delta else FULL for kind in arch.layers]
        config |= {name: getattr(arch.delta, ours) for name, ours in DELTA.items()}
    if family.leaves_out_rotary:
        config["no_rope_layers"] = [int(kind.rotary) for kind in arch.layers]
    if (experts := arch.experts) is not None:
        config |= {
            "num_experts_per_tok": experts.per_token,
            "moe_intermediate_size": experts.intermediate_size,
            "norm_topk_prob": experts.normalized,
        }
        dense = [number for number, kind in enumerate(arch.layers) if not kind.experts]
        if experts.biased:
            config |= {"n_routed_experts": experts.number, "routed_scaling_factor": experts.scale}
            config |= {"n_shared_experts": experts.shared_size // experts.intermediate_size}
            config |= {"first_k_dense_replace": len(dense), "n_group": 1, "topk_group": 1}
        else:
            config |= {"decoder_sparse_step": 1, "mlp_only_layers": dense}
        if experts.shared_gated:
            config["shared_expert_intermediate_size"] = experts.shared_size
        if experts.clamp is not None:
            config |= {"swiglu_limit": experts.clamp, "swiglu_alpha": experts.slope}
    return config


def _of_family(arch, family):
    """The keys that only some families have."""
    config = {activation_key(family): next(hf for hf, ours in ACTIVATIONS.items() if ours == arch.activation)}
    config |= {"attention_bias": arch.qkv_bias} if "attention_bias" in family.biases else {}
    config |= {"use_qk_norm": bool(arch.qk_norm)} if "use_qk_norm" in family.defaults else {}
    config |= {"mlp_bias": arch.mlp_bias} if "mlp_bias" in family.biases else {}
    if "query_pre_attn_scalar" in family.defaults:
        config["query_pre_attn_scalar"] = round(arch.head_dim / arch.query_scale**2)
        config |= {"attn_logit_softcapping": arch.attention_cap, "final_logit_softcapping": arch.logit_cap}
    return config
