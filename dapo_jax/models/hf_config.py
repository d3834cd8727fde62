"""Host: the Hugging Face config.json of an architecture."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from dapo_jax.models.architecture import Architecture, Layer
from dapo_jax.models.families import FAMILIES, LANGUAGE_MODEL, REWARD_MODEL


def hf_config(
    arch: Architecture,
    *,
    dtype: str,
    eos_ids: Sequence[int],
    pad_id: int,
    bos_id: int | None,
    max_position_embeddings: int,
) -> dict[str, Any]:
    """The config that `architecture_from_hf` reads as `arch`, in the spelling of transformers 4, which 5 reads too."""
    family = FAMILIES[arch.family]
    described = family.qkv_bias, family.qk_norm, (Layer(),)
    assert described == (arch.qkv_bias, arch.qk_norm, arch.pattern), f"{arch} is not of its family"
    config = {
        "architectures": [family.hf_name + (REWARD_MODEL if arch.scalar_head else LANGUAGE_MODEL)],
        "model_type": arch.family,
        "torch_dtype": dtype,
        "vocab_size": arch.vocab_size,
        "hidden_size": arch.hidden_size,
        "intermediate_size": arch.intermediate_size,
        "num_hidden_layers": arch.num_layers,
        "num_attention_heads": arch.num_heads,
        "num_key_value_heads": arch.num_kv_heads,
        "head_dim": arch.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": arch.rms_norm_eps,
        "rope_theta": arch.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": max_position_embeddings,
        "tie_word_embeddings": arch.tie_embeddings,
        "initializer_range": arch.initializer_range,
        "bos_token_id": bos_id,
        "eos_token_id": one_or_all(eos_ids),
        "pad_token_id": pad_id,
    }
    if arch.rope_scaling is not None:
        config["rope_scaling"] = {"rope_type": "llama3", **dataclasses.asdict(arch.rope_scaling)}
    if family.window_by_default:
        config["sliding_window"] = None
    if arch.scalar_head:
        config["id2label"] = {"0": "LABEL_0"}
    return config


def one_or_all(eos_ids: Sequence[int]) -> int | list[int]:
    """As Hugging Face writes eos_token_id: a number, or a list of several."""
    return eos_ids[0] if len(eos_ids) == 1 else list(eos_ids)
