"""Host: the architecture that a Hugging Face config.json describes."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dapo_jax.data.model_files import is_positive_number, is_size, read_object
from dapo_jax.errors import InputError
from dapo_jax.hub.names import GGUF, is_gguf
from dapo_jax.models.architecture import Architecture, Delta, Experts, Layer, kinds_of
from dapo_jax.models.families import FAMILIES, Family
from dapo_jax.models.rope_scaling import rope_problems, rope_type, scaling_from_hf

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
DELTA = {  # sizes of gated delta layers: Hugging Face's names and ours
    "linear_num_key_heads": "key_heads",
    "linear_num_value_heads": "value_heads",
    "linear_key_head_dim": "key_dim",
    "linear_value_head_dim": "value_dim",
    "linear_conv_kernel_dim": "filter_width",
}
OPTIONAL_SIZES = (
    *("num_key_value_heads", "head_dim", "sliding_window", "query_pre_attn_scalar", "no_rope_layer_interval"),
    *("sliding_window_pattern", "n_routed_experts", "n_group", "topk_group"),
    *("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step"),
    *("shared_expert_intermediate_size", "full_attention_interval", *DELTA),
)
REQUIRED = (*SIZES, "rms_norm_eps")
TYPES = {  # rule: its test, and the keys besides the sizes for which it holds where they are not null
    "a positive number": (
        is_positive_number,
        ("rms_norm_eps", "rope_theta", "rope_local_base_freq", "attn_logit_softcapping", "final_logit_softcapping")
        + ("swiglu_limit", "swiglu_alpha"),
    ),
    "a number from 0": (
        lambda value: value == 0 or is_positive_number(value),
        ("initializer_range", "max_window_layers", "routed_scaling_factor"),
    ),
    "an integer from 0": (
        lambda value: type(value) is int and (value == 0 or is_size(value)),
        ("first_k_dense_replace", "n_shared_experts", "num_nextn_predict_layers"),
    ),
    "an object": (
        lambda value: isinstance(value, dict),
        ("rope_parameters", "rope_scaling", "id2label", "quantization_config"),
    ),
    "a list": (
        lambda value: isinstance(value, list),
        ("layer_types", "no_rope_layers", "mlp_only_layers"),
    ),
    "true or false": (
        lambda value: isinstance(value, bool),
        ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window", "norm_topk_prob", "use_qk_norm"),
    ),
}
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}  # Hugging Face's name -> ours
# keys that only some families read: those with the key in their biases or defaults
OF_SOME = "attention_bias", "mlp_bias", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"
# keys that only families read whose defaults have them, and that these cannot do without
OF_EXPERTS = (
    *("num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step", "first_k_dense_replace", "n_group"),
    *("n_routed_experts", "n_shared_experts", "shared_expert_intermediate_size", "routed_scaling_factor", "topk_group"),
    *("norm_topk_prob", "swiglu_limit", "swiglu_alpha", "use_qk_norm"),
)
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
MAX_LAYERS = 10_000
OF_TEXT = "tie_word_embeddings", "dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id"  # may be above


def read_architecture(directory: str | Path) -> Architecture:
    """The architecture described by `directory`/config.json. ValueError names what is missing or not supported."""
    path = model_directory(directory) / "config.json"
    if not path.exists():
        raise InputError(f"{path} does not exist: model.path must be a Hugging Face model directory")
    hf = described(directory)
    try:
        return architecture_from_hf(hf)
    except ValueError as error:
        cure = "correct the file, choose a supported model, or download it again"
        raise InputError(f"{path}: {error}; {cure}") from error


def described(directory: str | Path) -> dict[str, Any]:
    """The text part of a model's config.json."""
    return text_part(read_object(model_directory(directory) / "config.json"))


def takes_images(directory: str | Path) -> bool:
    """Whether only a part of a model, that about text, is read."""
    hf = read_object(model_directory(directory) / "config.json")
    return text_part(hf) is not hf


def text_part(hf: dict[str, Any]) -> dict[str, Any]:
    """A config.json; of a model that also takes images, what it says of its text part, as that of a language model."""
    text, names = hf.get("text_config"), hf.get("architectures")
    family = next(
        (family for family in FAMILIES.values() if family.nested_name and names == [family.nested_name]), None
    )
    if family is None or not isinstance(text, dict):
        return hf
    above = {key: hf[key] for key in OF_TEXT if key in hf}
    quantized = {key: hf[key] for key in ("quantization_config",) if hf.get(key) is not None}
    return {**above, **text, **quantized, "architectures": [family.architecture_name(False)]}


def context_length(directory: str | Path) -> int | None:
    """The context length of a model in tokens; None if its config.json does not say."""
    length = described(directory).get("max_position_embeddings")
    return length if isinstance(length, int) else None


def model_directory(path: str | Path) -> Path:
    """`path` as a directory. ValueError says what else it is."""
    path = Path(path)
    if not path.is_dir():
        state = "is a file" if path.exists() else "does not exist"
        raise InputError(f"the model path {path} {GGUF if is_gguf(path) else f'{state}: give a model directory'}")
    return path


def architecture_from_hf(hf: dict[str, Any]) -> Architecture:
    """Translates a Hugging Face config, in the spelling before or after transformers 5."""
    known = {
        family.architecture_name(scalar_head): name
        for name, family in FAMILIES.items()
        for scalar_head in (False, True)
    }
    names = hf.get("architectures") or []
    if not isinstance(names, list):
        raise InputError(f"architectures={names!r} must be a list")
    if len(names) != 1 or not isinstance(names[0], str) or names[0] not in known:
        nested = sorted(family.nested_name for family in FAMILIES.values() if family.nested_name)
        raise InputError(
            f"architectures={names} is not supported: choose one of {sorted(known)}, or {', '.join(nested)}, of which "
            "the text part is read"
        )
    name = known[names[0]]
    family = FAMILIES[name]
    scalar_head = names[0] == family.architecture_name(True)
    others = {*OF_EXPERTS, "mlp_only_layers"} - family.defaults.keys()
    hf = {**family.defaults, **{key: value for key, value in hf.items() if key not in others}}
    mistyped = _mistyped(hf)
    if mistyped:
        raise InputError("; ".join(mistyped))
    rope, local, problems = _rope(hf, family)
    length = hf.get("max_position_embeddings")
    problems += _unsupported(hf, family) + rope_problems(rope, length, partial=family.partial_rotary)
    if hf.get("model_type") not in (None, name):
        problems.append(f"model_type={hf['model_type']!r}: must be {name!r}")
    if family.local_theta:
        problems += [f"in layers with a window, {problem}" for problem in _local_problems(local)]
    num_labels = len(hf.get("id2label") or ["LABEL_0", "LABEL_1"])  # two is Hugging Face's default
    if scalar_head and num_labels != 1:
        problems.append(f"{num_labels} labels: a reward model has one")
    if problems:
        raise InputError(f"{names[0]} with " + "; ".join(problems))
    heads = hf["num_attention_heads"]
    size, biased = hf.get("head_dim") or hf["hidden_size"] // heads, _has_bias(hf, family, "attention_bias")
    scaling = scaling_from_hf(rope, length)
    has_own = bool(family.local_theta) and (scaling is not None or local["rope_theta"] != rope["rope_theta"])
    return Architecture(
        family=name,
        vocab_size=hf["vocab_size"],
        hidden_size=hf["hidden_size"],
        intermediate_size=hf["intermediate_size"],
        num_layers=hf["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=hf.get("num_key_value_heads") or heads,
        head_dim=size,
        rope_theta=float(rope["rope_theta"]),
        rms_norm_eps=hf["rms_norm_eps"],
        tie_embeddings=bool(hf.get("tie_word_embeddings")),
        mlp_bias=_has_bias(hf, family, "mlp_bias"),
        query_scale=(size / (hf.get("query_pre_attn_scalar") or size)) ** 0.5,
        attention_cap=hf.get("attn_logit_softcapping"),
        logit_cap=hf.get("final_logit_softcapping"),
        rope_scaling=scaling,
        initializer_range=hf.get("initializer_range", 0.02),
        scalar_head=scalar_head,
        experts=None if family.experts is None else _experts(hf, family.experts),
        delta=Delta(**{ours: hf[name] for name, ours in DELTA.items()}) if family.delta else None,
        rotary_size=_rotary_size(size, rope.get("partial_rotary_factor", family.rotary_share)),
        **kinds_of(_layers(hf, family, float(local["rope_theta"]) if has_own else None)),
        **{"qkv_bias": biased, "output_bias": biased, "qk_norm": "head" * bool(hf.get("use_qk_norm")), **family.traits},
    )


def _mistyped(hf: dict[str, Any]) -> list[str]:
    problems = [
        f"{name}={hf[name]!r} must be a positive integer"
        for name in (*SIZES, *OPTIONAL_SIZES)
        if hf.get(name) is not None and not is_size(hf[name])
    ]
    for rule, (fits, names) in TYPES.items():
        wrong = [name for name in names if hf.get(name) is not None and not fits(hf[name])]
        problems += [f"{name}={hf[name]!r} must be {rule}" for name in wrong]
    if not problems and (hf.get("num_hidden_layers") or 0) > MAX_LAYERS:
        problems.append(f"num_hidden_layers={hf['num_hidden_layers']} must be at most {MAX_LAYERS}")
    return problems


def _has_bias(hf: dict[str, Any], family: Family, name: str) -> bool:
    return name in family.biases and bool(hf.get(name))


def _rope(hf: dict[str, Any], family: Family) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """The rotary embedding of most layers, that of layers with a window, both with `rope_theta`, and contradictions.

    transformers 4 writes rope_theta and rope_scaling. 5 writes rope_parameters, with an entry for each kind of layer
    where windows have a base of their own.
    """
    given, problems = hf.get("rope_parameters") or {}, []
    if given and any(isinstance(value, dict) for value in given.values()) != bool(family.local_theta):
        what = "entries" if family.local_theta else "no entries"
        problems.append(f"rope_parameters={given}: must have {what} {FULL} and {SLIDING} in this family")
    entries = given if family.local_theta else {FULL: given}
    full, local = (value if isinstance(value := entries.get(kind), dict) else {} for kind in (FULL, SLIDING))
    above = {key: hf.get(key) for key in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")}
    of_windows = {} if family.local_theta == "rope_theta" else {"rope_theta": hf.get(family.local_theta)}
    scaling = hf.get("rope_scaling") or (family.scaling if hf.get("rope_parameters") is None else {})
    if scaling and "rope_theta" in given and not hf.get("rope_theta"):
        problems.append("rope_scaling next to rope_parameters, whose rope_theta is then not read: merge the two")
    full = _agreed({"the top level": above, "rope_scaling": scaling, "rope_parameters": full}, problems)
    local = _agreed({family.local_theta: of_windows, "rope_parameters": local}, problems)
    default = family.default_local_theta or hf.get("rope_theta") or family.theta
    return {"rope_theta": family.theta, **full}, {"rope_theta": default, **local}, problems


def _agreed(places: Mapping[str, Mapping[str, Any]], problems: list[str]) -> dict[str, Any]:
    """The settings of several places of a config.json. Adds to `problems` what two of them say differently."""
    found: dict[str, tuple[Any, str]] = {}
    for place, values in places.items():
        spelled = {**values, "rope_type": rope_type(values)} if {"rope_type", "type"} & values.keys() else values
        for key, value in spelled.items():
            before, where = found.get(key, (value, place))
            if value is not None and before != value:
                problems.append(f"{key}={before!r} of {where}, but {value!r} of {place}")
            if value is not None and key != "type":
                found[key] = value, place
    return {key: value for key, (value, _) in found.items()}


def _local_problems(local: dict[str, Any]) -> list[str]:
    if local.get("rope_type", "default") != "default":
        return [f"rope_type={local['rope_type']!r}: only 'default' is supported"]
    return rope_problems(local, None)


def _layers(hf: dict[str, Any], family: Family, theta: float | None) -> tuple[Layer, ...]:
    """The kind of each layer; `theta` of those with a window, None if it is that of all."""
    numbers = range(hf["num_hidden_layers"])
    rotary = [True for _ in numbers]
    if family.leaves_out_rotary:
        every = hf["no_rope_layer_interval"]
        rotary = list(map(bool, hf.get("no_rope_layers") or [(i + 1) % every for i in numbers]))
    sparse = [False for _ in numbers]
    if family.experts is not None:
        step, dense = hf.get("decoder_sparse_step", 1), hf.get("mlp_only_layers") or []
        dense = [*dense, *numbers[: hf.get("first_k_dense_replace", 0)]]
        sparse = [i not in dense and (i + 1) % step == 0 for i in numbers]
    linear = [False for _ in numbers]
    if family.delta:
        types = hf.get("layer_types") or []
        every = hf["full_attention_interval"]
        linear = [kind == LINEAR for kind in types] or [(i + 1) % every != 0 for i in numbers]
    kinds = [
        Layer(rotary=one and not recurs, experts=other, delta=recurs)
        for one, other, recurs in zip(rotary, sparse, linear, strict=True)
    ]
    return tuple(
        replace(kind, window=hf["sliding_window"], theta=theta) if windowed else kind
        for kind, windowed in zip(kinds, _windowed(hf, family), strict=True)
    )


def _windowed(hf: dict[str, Any], family: Family) -> list[bool]:
    """Which layers have a window."""
    count, types = hf["num_hidden_layers"], hf.get("layer_types")
    if family.window == "never" or hf.get("sliding_window") is None:
        return [False] * count
    if family.window == "switched" and not hf.get("use_sliding_window"):
        return [False] * count
    if types is not None:
        return [kind == SLIDING for kind in types]
    if family.window == "all":
        return [True] * count
    if family.window == "switched":
        return [i >= hf.get("max_window_layers", 28) for i in range(count)]
    own = "sliding_window_pattern" in family.defaults
    every = (own and hf["sliding_window_pattern"]) or family.full_every
    return [(i + 1) % every != 0 for i in range(count)]


def _num_experts(hf: dict[str, Any]) -> Any:
    return hf.get("n_routed_experts") or hf.get("num_local_experts") or hf.get("num_experts")


def _experts(hf: dict[str, Any], fixed: Mapping[str, Any]) -> Experts:
    size = hf.get("moe_intermediate_size") or hf["intermediate_size"]
    fixed = {"normalized": bool(hf.get("norm_topk_prob")), **fixed}
    return Experts(
        number=_num_experts(hf),
        per_token=hf["num_experts_per_tok"],
        intermediate_size=size,
        scale=float(hf.get("routed_scaling_factor", 1.0)),
        shared_size=hf.get("shared_expert_intermediate_size") or size * hf.get("n_shared_experts", 0),
        clamp=hf.get("swiglu_limit"),
        slope=hf.get("swiglu_alpha", 1.0),
        **fixed,
    )


def _rotary_size(head_dim: int, share: float) -> int:
    """`Architecture.rotary_size`."""
    return 0 if share == 1.0 else int(head_dim * share)


def activation_key(family: Family) -> str:
    """The key of the feed-forward network's activation."""
    return "hidden_activation" if "hidden_activation" in family.defaults else "hidden_act"


def _unsupported(hf: dict[str, Any], family: Family) -> list[str]:
    problems = [f"no {name}" for name in REQUIRED if hf.get(name) is None]
    spelling = activation_key(family)
    activation, wanted = hf.get(spelling, "silu"), family.traits.get("activation", "silu")
    if not isinstance(activation, str) or ACTIVATIONS.get(activation) != wanted:
        name = next(name for name, ours in ACTIVATIONS.items() if ours == wanted)
        problems.append(f"{spelling}={activation!r}: only {name!r} is supported")
    for name in OF_SOME:
        if hf.get(name) and name not in {*family.biases, *family.defaults}:
            problems.append(f"{name}={json.dumps(hf[name])}: not supported in this family")
    if hf.get("use_bidirectional_attention") or hf.get("is_causal") is False:
        problems.append("use_bidirectional_attention=true or is_causal=false: only causal attention is supported")
    if hf.get("per_layer_config"):
        problems.append("per_layer_config: layers with sizes of their own are not supported")
    quantized = hf.get("quantization_config")
    if quantized is not None and (method := quantized.get("quant_method")) != family.quantization:
        only = f"only {family.quantization!r} is" if family.quantization else "quantized weights are not"
        problems.append(f"quantization_config.quant_method={method!r}: {only} read in this family")
    problems += _unsupported_layers(hf, family)
    return problems


def _unsupported_layers(hf: dict[str, Any], family: Family) -> list[str]:
    problems, count, window = [], hf.get("num_hidden_layers"), hf.get("sliding_window")
    for name in ("layer_types", "no_rope_layers"):
        if hf.get(name) is not None and len(hf[name]) != count:
            problems.append(f"{name} of {len(hf[name])} layers: there are {count}")
    if family.window == "never" and window is not None and hf.get("use_sliding_window"):
        problems.append(f"sliding_window={window}: only full attention is supported in this family")
    kinds = set(map(str, hf.get("layer_types") or []))
    has_windows = family.window in ("all", "typed") or (family.window == "switched" and hf.get("use_sliding_window"))
    allowed = {FULL, SLIDING} if has_windows and window is not None else {FULL}
    allowed |= {LINEAR} if family.delta else set()
    if kinds - allowed:
        problems.append(
            f"layer_types={sorted(kinds)} with sliding_window={window}: only {sorted(allowed)} is supported"
        )
    if not all(is_size(one) or one == 0 for one in hf.get("mlp_only_layers") or []):
        problems.append(f"mlp_only_layers={hf['mlp_only_layers']}: must be numbers of layers")
    missing = [name for name in OF_EXPERTS if name in family.defaults and hf.get(name) is None]
    if family.experts is not None and "n_routed_experts" not in missing and _num_experts(hf) is None:
        missing.append("num_experts")
    problems += [f"no {name}" for name in missing]
    if any(hf.get(name, 1) != 1 for name in ("n_group", "topk_group")):
        problems.append(f"n_group={hf.get('n_group')}, topk_group={hf.get('topk_group')}: only 1 is supported")
    return problems
