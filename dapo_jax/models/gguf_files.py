"""Host: metadata and dequantised parameters of a GGUF file, the format of llama.cpp."""

import functools
from pathlib import Path
from typing import Any

import numpy as np

from dapo_jax.errors import InputError
from dapo_jax.models.architecture import Architecture
from dapo_jax.models.assemble import Place, StoredTensor, assemble
from dapo_jax.models.families import FAMILIES
from dapo_jax.models.gguf_layout import check_layout
from dapo_jax.models.model_files import is_size, unreadable

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
    "output_bias": "blk.{layer}.attn_output.bias",
    "attention_out_norm": "blk.{layer}.post_attention_norm.weight",
    "mlp_norm": "blk.{layer}.ffn_norm.weight",
    "gate": "blk.{layer}.ffn_gate.weight",
    "up": "blk.{layer}.ffn_up.weight",
    "down": "blk.{layer}.ffn_down.weight",
    "gate_bias": "blk.{layer}.ffn_gate.bias",
    "up_bias": "blk.{layer}.ffn_up.bias",
    "down_bias": "blk.{layer}.ffn_down.bias",
    "router": "blk.{layer}.ffn_gate_inp.weight",
    "expert_gate": "blk.{layer}.ffn_gate_exps.weight",  # one tensor for all experts of a layer
    "expert_up": "blk.{layer}.ffn_up_exps.weight",
    "expert_down": "blk.{layer}.ffn_down_exps.weight",
    "mlp_out_norm": "blk.{layer}.post_ffw_norm.weight",
    "final_norm": "output_norm.weight",
    "head": "output.weight",
}


def load_gguf(path: str | Path, arch: Architecture, place: Place) -> dict[str, Any]:
    """The float32 parameters of `arch` from a GGUF file, dequantised tensor by tensor.

    ValueError names tensors that are missing, unknown, misshapen, or of a type that gguf cannot dequantise.
    """
    heads_of = {"attn_q": arch.num_heads, "attn_k": arch.num_kv_heads}
    interleaved = heads_of if FAMILIES[arch.family].gguf_interleaved else {}
    tensors = {}
    for tensor in open_gguf(path).tensors:
        heads = interleaved.get(tensor.name.rpartition(".")[0].rpartition(".")[2])
        offset = arch.norm_offset if tensor.name.endswith("norm.weight") else 0.0
        # GGUF lists the dimensions from the innermost to the outermost.
        shape = tuple(tensor.shape[::-1].tolist())
        tensors[tensor.name] = StoredTensor(shape, functools.partial(_read, tensor, heads, offset))
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
        raise ImportError(f"{path} needs the package gguf: pip install gguf") from error
    try:
        check_layout(path)
        return gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, TypeError) as error:
        raise unreadable(path, error) from error


def _read(tensor: Any, interleaved_heads: int | None, offset: float) -> np.ndarray:
    """The tensor in our order of rows; `offset` is what the file adds to it."""
    from gguf.quants import dequantize

    try:
        array = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise InputError(f"tensor {tensor.name} has type {tensor.tensor_type.name}: {error}") from error
    if interleaved_heads is not None:
        rows = array.reshape(interleaved_heads, -1, 2, *array.shape[1:])
        array = rows.swapaxes(1, 2).reshape(array.shape)
    return array - np.float32(offset) if offset else array
