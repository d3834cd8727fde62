"""Host: the families of models, a page of data: what sets each apart from Llama. Code asks for traits, never for names.

A family whose traits all exist is one entry of FAMILIES.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LANGUAGE_MODEL, REWARD_MODEL = "ForCausalLM", "ForSequenceClassification"  # how Hugging Face's names end


@dataclass(frozen=True)
class Family:
    """Names of a family, its layers, and how its config.json is read."""

    hf_name: str  # how the names of its Hugging Face architectures begin
    traits: Mapping[str, Any] = field(default_factory=dict)  # fields of `Architecture` that are the same in all models
    # what config.json may say besides
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of keys that it may lack
    biases: tuple[str, ...] = ()  # of "attention_bias" and "mlp_bias", those that count
    window: str = "never"  # layers with a window: never | all | switched (use_sliding_window) | typed; but for "never",
    # layer_types says which, if it is there
    full_every: int = 0  # "typed", without layer_types: the last of so many layers attends to all tokens
    theta: float = 10000.0  # base of rotary embeddings, if config.json does not name it
    scaling: Mapping[str, Any] = field(default_factory=dict)  # of them, if config.json says nothing of it
    local_theta: str = ""  # key of the rotary base of layers with a window, which is never scaled; empty: as all layers
    default_local_theta: float | None = None  # if config.json does not name it; None: that of the other layers
    leaves_out_rotary: bool = False  # no_rope_layers, or one of no_rope_layer_interval, have no rotary embedding
    experts: Mapping[str, Any] | None = None  # mixtures of experts: fields of `Experts` that are the same in all models
    partial_rotary: bool = False  # partial_rotary_factor of a head's numbers carry positions, ...
    rotary_share: float = 1.0  # ... without that key, this share
    delta: bool = False  # layers that layer_types calls linear_attention have linear attention by a gated delta rule
    nested_name: str = ""  # Hugging Face's name of its models that also take images, of which the text part is read
    quantization: str = ""  # quant_method of its files that is read (models/mxfp4.py)
    reward_name: str = ""  # how the names of its reward models begin, if not by hf_name

    def architecture_name(self, scalar_head: bool) -> str:
        """Hugging Face's name of its language models, or of its reward models."""
        return (self.reward_name or self.hf_name) + REWARD_MODEL if scalar_head else self.hf_name + LANGUAGE_MODEL


WINDOW = {"sliding_window": 4096}
GEMMA = {"norms": "around", "norm_offset": 1.0, "activation": "gelu_tanh", "scale_embeddings": True}
GEMMA_DEFAULTS = {
    "tie_word_embeddings": True,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    **WINDOW,
    "hidden_activation": "gelu_pytorch_tanh",
}

QWEN3_5 = {"qk_norm": "head", "norm_offset": 1.0, "gated_attention": True}
QWEN3_5_DEFAULTS = {
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
}

FAMILIES: dict[str, Family] = {  # by Hugging Face's model_type
    "llama": Family("Llama", biases=("attention_bias", "mlp_bias")),
    "mistral": Family("Mistral", defaults=WINDOW, window="all"),
    "qwen2": Family("Qwen2", traits={"qkv_bias": True}, defaults=WINDOW, window="switched"),
    "qwen3": Family(
        "Qwen3",
        traits={"qk_norm": "head"},
        defaults={**WINDOW, "head_dim": 128},
        biases=("attention_bias",),
        window="switched",
    ),
    "qwen3_moe": Family(
        "Qwen3Moe",
        traits={"qk_norm": "head"},
        defaults={
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        biases=("attention_bias",),
        experts={},
    ),
    "glm4_moe": Family(
        "Glm4Moe",
        traits={"output_bias": False},
        defaults={
            "n_routed_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408,
            "n_shared_experts": 1,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": True,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "use_qk_norm": False,
            "num_nextn_predict_layers": 0,
        },
        biases=("attention_bias",),
        partial_rotary=True,
        rotary_share=0.5,
        experts={"scores": "sigmoid", "biased": True},
    ),
    "qwen3_5_text": Family(
        "Qwen3_5",
        traits=QWEN3_5,
        defaults={**QWEN3_5_DEFAULTS, "tie_word_embeddings": False},
        biases=("attention_bias",),
        partial_rotary=True,
        rotary_share=0.25,
        delta=True,
        reward_name="Qwen3_5Text",
        nested_name="Qwen3_5ForConditionalGeneration",
    ),
    "qwen3_5_moe_text": Family(
        "Qwen3_5Moe",
        traits=QWEN3_5,
        defaults={
            **QWEN3_5_DEFAULTS,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "intermediate_size": 512,  # of dense networks, which no layer has
        },
        biases=("attention_bias",),
        partial_rotary=True,
        rotary_share=0.25,
        delta=True,
        experts={"shared_gated": True, "normalized": True},
        nested_name="Qwen3_5MoeForConditionalGeneration",
    ),
    "gpt_oss": Family(
        "GptOss",
        traits={"sinks": True},
        defaults={
            **{"sliding_window": 128, "head_dim": 64, "attention_bias": True},
            **{"num_local_experts": 128, "num_experts_per_tok": 4, "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        },
        biases=("attention_bias",),
        window="typed",
        full_every=2,
        theta=1.5e5,
        scaling={"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
        experts={"biases": True, "normalized": True},
        quantization="mxfp4",
    ),
    "smollm3": Family(
        "SmolLM3",
        defaults={"tie_word_embeddings": True, "no_rope_layer_interval": 4},
        biases=("attention_bias", "mlp_bias"),
        theta=2e6,
        leaves_out_rotary=True,
    ),
    "olmo2": Family("Olmo2", traits={"norms": "after", "qk_norm": "projection"}, biases=("attention_bias",)),
    "olmo3": Family(
        "Olmo3",
        traits={"norms": "after", "qk_norm": "projection"},
        defaults=WINDOW,
        biases=("attention_bias",),
        window="typed",
        full_every=4,
        theta=5e5,
        local_theta="rope_theta",
    ),
    "gemma2": Family(
        "Gemma2",
        traits=GEMMA,
        defaults={**GEMMA_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        biases=("attention_bias",),
        window="typed",
        full_every=2,
    ),
    "gemma3_text": Family(
        "Gemma3",
        traits={**GEMMA, "qk_norm": "head"},
        defaults={
            **GEMMA_DEFAULTS,
            **{"final_logit_softcapping": None, "sliding_window_pattern": 6},
            **{"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "rms_norm_eps": 1e-6},
        },
        biases=("attention_bias",),
        window="typed",
        full_every=6,
        theta=1e6,
        local_theta="rope_local_base_freq",
        default_local_theta=1e4,
        reward_name="Gemma3Text",
        nested_name="Gemma3ForConditionalGeneration",
    ),
}
