"""Host: the architecture that the metadata of a GGUF file describes."""

from collections.abc import Container
from pathlib import Path
from typing import Any

from dapo_jax.errors import InputError
from dapo_jax.models.architecture import Architecture, Experts, Layer, kinds_of, pattern_of
from dapo_jax.models.families import FAMILIES, Family
from dapo_jax.models.gguf_files import open_gguf, read_metadata
from dapo_jax.models.hf_architecture import MAX_LAYERS
from dapo_jax.models.model_files import is_positive_number, is_size
from dapo_jax.models.rope_scaling import rope_problems, scaling_from_hf

SIZES = ("block_count", "embedding_length", "feed_forward_length", "attention.head_count")
EXPERT_SIZES = ("expert_count", "expert_used_count", "expert_feed_forward_length")
OPTIONAL_SIZES = ("attention.head_count_kv", "attention.key_length", *EXPERT_SIZES)
NUMBERS = (
    *("attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.freq_base_swa"),
    *("attn_logit_softcapping", "final_logit_softcapping"),
)
REQUIRED = (*SIZES, "attention.layer_norm_rms_epsilon")
PATTERN = "attention.sliding_window_pattern"  # a number, or true or false for each layer
DEFAULTS = {  # by general.architecture: what llama.cpp assumes where a file says nothing
    "gemma2": {
        "attention.sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
}
ONLY = {  # the only values supported, by key
    "attention.causal": (True,),
    "attention.scale": (),
    "attention.temperature_scale": (0.0,),
    "attention.shared_kv_layers": (0,),
    "embedding_scale": (),
    "residual_scale": (),
    "logit_scale": (),
    "expert_gating_func": (1,),  # softmax
    "expert_group_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0.0, 1.0),
    "leading_dense_block_count": (0,),
    "nextn_predict_layers": (0,),
}
SCALING = "rope.scaling."
HF_SCALING = {  # the end of a key -> Hugging Face's name
    "type": "rope_type",
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
ATTENTION_FACTORS = ("attn_factor", "yarn_attn_factor")
NO_EFFECT = ("finetuned",)
LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}  # whose queries are scaled by D / N instead of H, as llama.cpp knows


def read_gguf_architecture(path: str | Path) -> Architecture:
    """The architecture described by the metadata of a GGUF file. ValueError names what is not supported."""
    reader = open_gguf(path)
    name = read_metadata(path, "general.").get("architecture")
    known = sorted({family.gguf_name for family in FAMILIES.values() if family.gguf_name is not None})
    if not isinstance(name, str) or name not in known:
        raise InputError(f"{path}: general.architecture={name!r} must be one of {known}")
    values = {**DEFAULTS.get(name, {}), **read_metadata(path, f"{name}.")}
    hf_type = _family(name, bool(values.get("attention.sliding_window")))
    family = FAMILIES[hf_type]
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    problems = _mistyped(values, tensors) or _unsupported(values, family, tensors)
    if problems:
        raise InputError(f"{path} ({name}): {'; '.join(problems)}: use the model's Hugging Face directory")
    hidden_size, num_heads, head_dim = values["embedding_length"], values["attention.head_count"], _head_dim(values)
    is_27b = LAYERS_OF_27B.get(name) == values["block_count"]
    try:
        return Architecture(
            family=hf_type,
            vocab_size=int(tensors["token_embd.weight"].shape[-1]),
            hidden_size=hidden_size,
            intermediate_size=values["feed_forward_length"],
            num_layers=values["block_count"],
            num_heads=num_heads,
            num_kv_heads=values.get("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            rope_theta=_theta(values),
            rms_norm_eps=values["attention.layer_norm_rms_epsilon"],
            tie_embeddings="output.weight" not in tensors,
            output_bias="blk.0.attn_output.bias" in tensors,
            mlp_bias="blk.0.ffn_gate.bias" in tensors,
            query_scale=(head_dim / (hidden_size // num_heads)) ** 0.5 if is_27b else 1.0,
            attention_cap=values.get("attn_logit_softcapping"),
            logit_cap=values.get("final_logit_softcapping"),
            rope_scaling=scaling_from_hf(_rope(values), values.get("context_length")),
            experts=_experts(values) if family.experts else None,
            pattern=pattern_of(_layers(values, family)),
            **{"qkv_bias": "blk.0.attn_q.bias" in tensors, **family.traits},
        )
    except ValueError as error:
        raise InputError(f"{path}: {error}: choose a supported model, or download it again") from error


def _family(name: str, windowed: bool) -> str:
    """The name in FAMILIES. Of two that share `name`, one has windows."""
    candidates = [hf_type for hf_type, family in FAMILIES.items() if family.gguf_name == name]
    return next((hf_type for hf_type in candidates if (FAMILIES[hf_type].window == "typed") == windowed), candidates[0])


def _head_dim(values: dict[str, Any]) -> int:
    return values.get("attention.key_length", values["embedding_length"] // values["attention.head_count"])


def _theta(values: dict[str, Any]) -> float:
    return values.get("rope.freq_base", 10000.0)


def _rope(values: dict[str, Any]) -> dict[str, Any]:
    """The rotary embedding, in Hugging Face's words."""
    rope = {"rope_theta": _theta(values)}
    if values.get(SCALING + "type", "none") == "none":
        return rope
    return rope | {hf: values[SCALING + key] for key, hf in HF_SCALING.items() if SCALING + key in values}


def _experts(values: dict[str, Any]) -> Experts:
    number, per_token, intermediate_size = (values[name] for name in EXPERT_SIZES)
    return Experts(number, per_token, intermediate_size, normalized=True)


def _layers(values: dict[str, Any], family: Family) -> tuple[Layer, ...]:
    numbers = range(values["block_count"])
    window = values.get("attention.sliding_window") or None
    pattern = values.get(PATTERN, family.full_every or 1)
    if not isinstance(pattern, list):  # the last of so many layers attends to all tokens
        pattern = [(i + 1) % pattern != 0 for i in numbers]
    windows = [window if windowed else None for windowed in pattern]
    rope_theta = _theta(values)
    theta = values.get("rope.freq_base_swa", family.default_local_theta or rope_theta)
    scaled = values.get(SCALING + "type", "none") != "none"
    own = float(theta) if family.local_theta and (scaled or theta != rope_theta) else None
    every = family.defaults["no_rope_layer_interval"] if family.leaves_out_rotary else 0
    rotary = [not every or (i + 1) % every != 0 for i in numbers]
    return kinds_of(windows, rotary, [family.experts] * len(numbers), own)


def _mistyped(values: dict[str, Any], tensors: Container[str]) -> list[str]:
    """What is missing, or is no number where there must be one."""
    problems = [f"{key} is missing" for key in REQUIRED if key not in values]
    for key, value in values.items():
        if isinstance(value, list) and key != PATTERN:
            problems.append(f"{key}={value}: must be one value, the same for all layers")
    if "token_embd.weight" not in tensors:
        problems.append("tensor token_embd.weight is missing")
    for key in (*SIZES, *OPTIONAL_SIZES):
        value = values.get(key, 1)
        if not (is_size(value) or isinstance(value, list)):  # a list is reported above
            problems.append(f"{key}={value!r}: must be a positive integer")
    if is_size(values.get("block_count")) and values["block_count"] > MAX_LAYERS:
        problems.append(f"block_count={values['block_count']}: must be at most {MAX_LAYERS}")
    for key in NUMBERS:
        if not is_positive_number(values.get(key, 1.0)):
            problems.append(f"{key}={values[key]!r}: must be a positive number")
    window = values.get("attention.sliding_window", 0)
    if not (is_size(window) or window == 0):
        problems.append(f"attention.sliding_window={window!r}: must be an integer from 0")
    return problems


def _unsupported(values: dict[str, Any], family: Family, tensors: Container[str]) -> list[str]:
    allowed = {**ONLY, "attention.value_length": (_head_dim(values),), "rope.dimension_count": (_head_dim(values),)}
    problems = [
        f"{key}={values[key]!r}: must be {' or '.join(map(str, only)) or 'absent'}"
        for key, only in allowed.items()
        if key in values and values[key] not in only
    ]
    problems += _scaling_problems(values)
    if "rope_freqs.weight" in tensors:
        problems.append("tensor rope_freqs.weight: scaled rotary embeddings in a table are not supported here")
    if not family.experts and values.get("expert_count"):
        problems.append(f"expert_count={values['expert_count']}: no experts are supported in this family")
    problems += [f"{key} is missing" for key in EXPERT_SIZES if family.experts and key not in values]
    return problems + _window_problems(values, family)


def _window_problems(values: dict[str, Any], family: Family) -> list[str]:
    window, pattern, count = values.get("attention.sliding_window"), values.get(PATTERN), values["block_count"]
    problems = []
    if window and family.window != "typed":
        problems.append(f"attention.sliding_window={window}: only full attention is supported in this family")
    if isinstance(pattern, list):
        if len(pattern) != count or not all(isinstance(windowed, bool) for windowed in pattern):
            problems.append(f"{PATTERN}={pattern}: must be true or false for each of {count} layers")
    elif pattern is not None and not is_size(pattern):
        problems.append(f"{PATTERN}={pattern!r}: must be a positive integer, or true or false for each layer")
    theta = values.get("rope.freq_base_swa", _theta(values))
    if not family.local_theta and theta != _theta(values):
        problems.append(f"rope.freq_base_swa={theta}: must be rope.freq_base={_theta(values)} in this family")
    return problems


def _scaling_problems(values: dict[str, Any]) -> list[str]:
    given = {key: value for key, value in values.items() if key.startswith("rope.scal")}
    kind = given.get(SCALING + "type")
    if not given or kind == "none":
        return []
    if kind not in ("linear", "yarn"):
        return [f"{given}: this scaling of rotary embeddings is not supported here"]
    known = {SCALING + name for name in (*HF_SCALING, *ATTENTION_FACTORS, *NO_EFFECT)}
    problems = [f"{key}={given[key]!r}: not supported here" for key in given if key not in known]
    problems += rope_problems(_rope(values), values.get("context_length"))
    if problems:
        return problems
    scaling = scaling_from_hf(_rope(values), values.get("context_length"))
    expected = getattr(scaling, "attention_factor", 1.0)
    for key in (SCALING + name for name in ATTENTION_FACTORS):
        value = given.get(key, expected)  # whether it replaces or multiplies the usual factor depends on the reader
        if not is_positive_number(value) or abs(value - expected) > 1e-4 * expected:
            problems.append(f"{key}={value!r}: must be absent or {expected:.6g}, that of {kind} scaling")
    return problems
