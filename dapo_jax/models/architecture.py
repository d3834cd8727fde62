"""Host: the sizes and switches of a decoder-only transformer, read from a Hugging Face config.json."""

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dapo_jax.errors import InputError
from dapo_jax.models.families import FAMILIES, LANGUAGE_MODEL, REWARD_MODEL, Family
from dapo_jax.models.model_files import read_object


@dataclass(frozen=True)
class Llama3RopeScaling:
    """Frequency scaling of Llama 3.1 (long wavelengths are stretched by `factor`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class Layer:
    """The kind of a layer. Windows and experts are not implemented yet: `Architecture` refuses them."""

    window: int | None = None  # tokens that a token attends to, itself included; None: all tokens up to itself
    rotary: bool = True  # False: queries and keys carry no position
    experts: int = 0  # 0: one dense feed-forward network


@dataclass(frozen=True)
class Architecture:
    """V vocabulary, D hidden, F feed-forward, L layers, N query heads, K key-value heads, H head size."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    tie_embeddings: bool
    qkv_bias: bool = False
    qk_norm: bool = False
    rope_scaling: Llama3RopeScaling | None = None
    initializer_range: float = 0.02
    scalar_head: bool = False  # one number per token instead of the vocabulary's scores
    pattern: tuple[Layer, ...] = (Layer(),)  # kinds of consecutive layers, repeated from the first to the last

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The kind of each of the L layers."""
        return tuple(self.pattern[i % len(self.pattern)] for i in range(self.num_layers))

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise InputError(
                f"num_attention_heads={self.num_heads} must be a multiple of num_key_value_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise InputError(f"head_dim={self.head_dim} must be even, for rotary embeddings")
        for layer in self.pattern:
            if layer.window is not None or layer.experts:
                raise InputError(f"{layer}: only full attention and dense feed-forward networks are supported")


SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
REQUIRED = (*SIZES, "rms_norm_eps")
TYPES = {  # of the keys besides the sizes, where they are not null
    "a positive number": ("rms_norm_eps", "rope_theta"),
    "a number from 0": ("initializer_range",),
    "an object": ("rope_parameters", "rope_scaling", "id2label"),
    "a list": ("architectures", "layer_types"),
    "true or false": ("tie_word_embeddings",),
}
MAX_SIZE, MAX_LAYERS = 2**31 - 1, 10_000


def read_architecture(directory: str | Path) -> Architecture:
    """The architecture described by `directory`/config.json. ValueError names what is not supported."""
    path = Path(directory) / "config.json"
    if not path.exists():
        raise InputError(f"{path} does not exist: model.path must be a Hugging Face model directory")
    hf = read_object(path)
    try:
        return architecture_from_hf(hf)
    except ValueError as error:
        raise InputError(f"{path}: {error}: choose a supported model, or download it again") from error


def architecture_from_hf(hf: dict[str, Any]) -> Architecture:
    """Translates a Hugging Face config, in the spelling before or after transformers 5."""
    mistyped = _mistyped(hf)
    if mistyped:
        raise InputError("; ".join(mistyped))
    known = {
        family.hf_name + task: name for name, family in FAMILIES.items() for task in (LANGUAGE_MODEL, REWARD_MODEL)
    }
    names = hf.get("architectures") or []
    if len(names) != 1 or not isinstance(names[0], str) or names[0] not in known:
        raise InputError(f"architectures={names} is not supported: choose one of {sorted(known)}")
    name = known[names[0]]
    family = FAMILIES[name]
    scalar_head = names[0].endswith(REWARD_MODEL)
    rope = hf.get("rope_parameters") or {}
    scaling = hf.get("rope_scaling") or rope
    problems = _unsupported(hf, family) + _unsupported_rope(scaling)
    num_labels = len(hf.get("id2label") or ["LABEL_0", "LABEL_1"])  # two is Hugging Face's default
    if scalar_head and num_labels != 1:
        problems.append(f"{num_labels} labels: a reward model has one")
    if problems:
        raise InputError(f"{names[0]} with " + "; ".join(problems))
    return Architecture(
        family=name,
        vocab_size=hf["vocab_size"],
        hidden_size=hf["hidden_size"],
        intermediate_size=hf["intermediate_size"],
        num_layers=hf["num_hidden_layers"],
        num_heads=hf["num_attention_heads"],
        num_kv_heads=hf.get("num_key_value_heads") or hf["num_attention_heads"],
        head_dim=hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
        rope_theta=float(rope.get("rope_theta") or hf.get("rope_theta") or 10000.0),
        rms_norm_eps=hf["rms_norm_eps"],
        tie_embeddings=bool(hf.get("tie_word_embeddings")),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        rope_scaling=_llama3_scaling(scaling) if _rope_type(scaling) == "llama3" else None,
        initializer_range=hf.get("initializer_range", 0.02),
        scalar_head=scalar_head,
    )


def is_size(value: Any) -> bool:
    """Whether `value` can be the size of something."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_SIZE


def is_positive_number(value: Any) -> bool:
    """Whether `value` is a finite number above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _mistyped(hf: dict[str, Any]) -> list[str]:
    sizes = (*SIZES, "num_key_value_heads", "head_dim")
    problems = [
        f"{name}={hf[name]!r} must be a positive integer"
        for name in sizes
        if hf.get(name) is not None and not is_size(hf[name])
    ]
    fits = {
        "a positive number": is_positive_number,
        "a number from 0": lambda value: value == 0 or is_positive_number(value),
        "an object": lambda value: isinstance(value, dict),
        "a list": lambda value: isinstance(value, list),
        "true or false": lambda value: isinstance(value, bool),
    }
    for rule, names in TYPES.items():
        problems += [
            f"{name}={hf[name]!r} must be {rule}"
            for name in names
            if hf.get(name) is not None and not fits[rule](hf[name])
        ]
    if not problems and (hf.get("num_hidden_layers") or 0) > MAX_LAYERS:
        problems.append(f"num_hidden_layers={hf['num_hidden_layers']} must be at most {MAX_LAYERS}")
    return problems


def _rope_type(scaling: dict[str, Any]) -> str:
    return scaling.get("rope_type", scaling.get("type", "default"))


def _llama3_scaling(scaling: dict[str, Any]) -> Llama3RopeScaling:
    return Llama3RopeScaling(**{field.name: scaling[field.name] for field in fields(Llama3RopeScaling)})


def _unsupported_rope(scaling: dict[str, Any]) -> list[str]:
    kind = _rope_type(scaling)
    if kind not in ("default", "llama3"):
        return [f"rope_type={kind!r}: only 'default' and 'llama3' are supported"]
    if scaling.get("partial_rotary_factor", 1.0) != 1.0:
        return [f"partial_rotary_factor={scaling['partial_rotary_factor']}: only 1.0 is supported"]
    theta = scaling.get("rope_theta", 1.0)
    problems = [] if is_positive_number(theta) else [f"rope_theta={theta!r}: must be a positive number"]
    for field in fields(Llama3RopeScaling) if kind == "llama3" else ():
        if field.name not in scaling:
            problems.append(f"no {field.name} for its llama3 rope scaling")
        elif not is_positive_number(scaling[field.name]):
            problems.append(f"{field.name}={scaling[field.name]!r} of its rope scaling: must be a positive number")
    return problems


def _unsupported(hf: dict[str, Any], family: Family) -> list[str]:
    problems = [f"no {name}" for name in REQUIRED if hf.get(name) is None]
    if hf.get("hidden_act", "silu") != "silu":
        problems.append(f"hidden_act={hf['hidden_act']!r}: only 'silu' is supported")
    for name in ("attention_bias", "mlp_bias"):
        if hf.get(name):
            problems.append(f"{name}=true: only the query, key and value biases of Qwen2 are supported")
    window_used = hf.get("use_sliding_window", family.window_by_default)
    if hf.get("sliding_window") is not None and window_used:
        problems.append(f"sliding_window={hf['sliding_window']}: only full attention is supported")
    if any(kind != "full_attention" for kind in hf.get("layer_types") or []):
        problems.append(f"layer_types={sorted(set(map(str, hf['layer_types'])))}: only full_attention is supported")
    return problems
