"""Host: architecture and dequantised parameters from a GGUF file, the format of llama.cpp."""

import functools
from collections.abc import Container
from pathlib import Path
from typing import Any

import numpy as np

from dapo_jax.errors import InputError
from dapo_jax.models.architecture import Architecture
from dapo_jax.models.assemble import Place, StoredTensor, assemble
from dapo_jax.models.families import FAMILIES
from dapo_jax.models.gguf_layout import check_layout
from dapo_jax.models.model_files import is_positive_number, is_size, unreadable

# general.architecture -> name in FAMILIES
ARCHITECTURES = {family.gguf_name: name for name, family in FAMILIES.items() if family.gguf_name is not None}

SIZES = ("block_count", "embedding_length", "feed_forward_length", "attention.head_count")
OPTIONAL_SIZES = ("attention.head_count_kv", "attention.key_length")
REQUIRED = (*SIZES, "attention.layer_norm_rms_epsilon")

# last part of a weight's path -> tensor name
TENSOR_NAMES = {
    "embedding": "token_embd.weight",
    "attention_norm": "blk.{layer}.attn_norm.weight",
    "query": "blk.{layer}.attn_q.weight",
    "key": "blk.{layer}.attn_k.weight",
    "value": "blk.{layer}.attn_v.weight",
    "query_bias": "blk.{layer}.attn_q.bias",
    "key_bias": "blk.{layer}.attn_k.bias",
    "value_bias": "blk.{layer}.attn_v.bias",
    "query_norm": "blk.{layer}.attn_q_norm.weight",
    "key_norm": "blk.{layer}.attn_k_norm.weight",
    "output": "blk.{layer}.attn_output.weight",
    "mlp_norm": "blk.{layer}.ffn_norm.weight",
    "gate": "blk.{layer}.ffn_gate.weight",
    "up": "blk.{layer}.ffn_up.weight",
    "down": "blk.{layer}.ffn_down.weight",
    "final_norm": "output_norm.weight",
    "head": "output.weight",
}


def read_gguf_architecture(path: str | Path) -> Architecture:
    """The architecture described by the metadata of a GGUF file. ValueError names what is not supported."""
    reader = open_gguf(path)
    name = read_metadata(path, "general.").get("architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise InputError(f"{path}: general.architecture={name!r} must be one of {sorted(ARCHITECTURES)}")
    family = FAMILIES[ARCHITECTURES[name]]
    values = read_metadata(path, f"{name}.")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    problems = _unsupported(values, tensors)
    if problems:
        raise InputError(f"{path} ({name}): {'; '.join(problems)}: use the model's Hugging Face directory")
    hidden_size, num_heads = values["embedding_length"], values["attention.head_count"]
    try:
        return Architecture(
            family=ARCHITECTURES[name],
            vocab_size=int(tensors["token_embd.weight"].shape[-1]),
            hidden_size=hidden_size,
            intermediate_size=values["feed_forward_length"],
            num_layers=values["block_count"],
            num_heads=num_heads,
            num_kv_heads=values.get("attention.head_count_kv", num_heads),
            head_dim=_head_dim(values),
            rope_theta=values.get("rope.freq_base", 10000.0),
            rms_norm_eps=values["attention.layer_norm_rms_epsilon"],
            tie_embeddings="output.weight" not in tensors,
            **family.traits,
        )
    except ValueError as error:
        raise InputError(f"{path}: {error}: choose a supported model, or download it again") from error


def _head_dim(values: dict[str, Any]) -> int:
    return values.get("attention.key_length", values["embedding_length"] // values["attention.head_count"])


def _unsupported(values: dict[str, Any], tensors: Container[str]) -> list[str]:
    problems = [f"{key} is missing" for key in REQUIRED if key not in values]
    for key, value in values.items():
        if isinstance(value, list):
            problems.append(f"{key}={value}: must be one value, the same for all layers")
    if "token_embd.weight" not in tensors:
        problems.append("tensor token_embd.weight is missing")
    for key in (*SIZES, *OPTIONAL_SIZES):
        value = values.get(key, 1)
        if not (is_size(value) or isinstance(value, list)):  # a list is reported above
            problems.append(f"{key}={value!r}: must be a positive integer")
    for key in ("attention.layer_norm_rms_epsilon", "rope.freq_base"):
        if not is_positive_number(values.get(key, 1.0)):
            problems.append(f"{key}={values[key]!r}: must be a positive number")
    if problems:
        return problems
    scaling = {key: value for key, value in values.items() if key.startswith("rope.scal")}
    if scaling and scaling.get("rope.scaling.type") != "none":
        problems.append(f"{scaling}: scaled rotary embeddings are not supported here")
    if "rope_freqs.weight" in tensors:
        problems.append("tensor rope_freqs.weight: scaled rotary embeddings are not supported here")
    rotated = values.get("rope.dimension_count", _head_dim(values))
    if rotated != _head_dim(values):
        problems.append(f"rope.dimension_count={rotated}: must be the head size, {_head_dim(values)}")
    window = values.get("attention.sliding_window")
    if window:
        problems.append(f"attention.sliding_window={window}: only full attention is supported")
    return problems


def load_gguf(path: str | Path, arch: Architecture, place: Place) -> dict[str, Any]:
    """The float32 parameters of `arch` from a GGUF file, dequantised tensor by tensor.

    ValueError names tensors that are missing, unknown, misshapen, or of a type that gguf cannot dequantise.
    """
    heads_of = {"attn_q": arch.num_heads, "attn_k": arch.num_kv_heads}
    interleaved = heads_of if FAMILIES[arch.family].gguf_interleaved else {}
    tensors = {}
    for tensor in open_gguf(path).tensors:
        heads = interleaved.get(tensor.name.removesuffix(".weight").rpartition(".")[2])
        # GGUF lists the dimensions from the innermost to the outermost.
        tensors[tensor.name] = StoredTensor(tuple(tensor.shape[::-1].tolist()), functools.partial(_read, tensor, heads))
    return assemble(Path(path), arch, tensors, lambda weight: TENSOR_NAMES[weight.path[-1]], place)


def gguf_context_length(path: str | Path) -> int | None:
    """The context length in tokens; None if the file does not say."""
    values = read_metadata(path, "")
    return next((value for name, value in values.items() if name.endswith(".context_length") and is_size(value)), None)


def read_metadata(path: str | Path, prefix: str) -> dict[str, Any]:
    """The entries of a GGUF file whose names begin with `prefix`, without it, as plain Python values.

    Raises:
        ImportError: without the optional package gguf.
        ValueError: the file cannot be read.
    """
    fields = {name: field for name, field in open_gguf(path).fields.items() if name.startswith(prefix)}
    try:
        return {name.removeprefix(prefix): field.contents() for name, field in fields.items()}
    except (ValueError, IndexError, KeyError, TypeError) as error:
        raise unreadable(Path(path), error) from error


def open_gguf(path: str | Path) -> Any:
    """A reader of the file. Its metadata takes seconds to read, so the last reader is cached until the file changes."""
    path = Path(path)
    return _open(path, path.stat().st_mtime_ns if path.exists() else 0)


@functools.lru_cache(maxsize=1)
def _open(path: Path, _modified: int) -> Any:
    try:
        import gguf
    except ImportError as error:
        raise ImportError(f"{path} needs the package gguf: pip install 'dapo_jax[quickstart]'") from error
    try:
        check_layout(path)
        return gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, TypeError) as error:
        raise unreadable(path, error) from error


def _read(tensor: Any, interleaved_heads: int | None) -> np.ndarray:
    from gguf.quants import dequantize

    try:
        array = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise InputError(f"tensor {tensor.name} has type {tensor.tensor_type.name}: {error}") from error
    if interleaved_heads is None:
        return array
    rows = array.reshape(interleaved_heads, -1, 2, array.shape[-1])
    return rows.swapaxes(1, 2).reshape(array.shape)
