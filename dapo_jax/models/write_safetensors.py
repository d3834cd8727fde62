"""Host: parameters to the safetensors files of a Hugging Face model directory, one file at a time, and its config."""

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import traverse_util
from safetensors.numpy import save_file

from dapo_jax.errors import InputError
from dapo_jax.models.architecture import Architecture
from dapo_jax.models.families import FAMILIES, Family
from dapo_jax.models.hf_architecture import FULL, SLIDING
from dapo_jax.models.rope_scaling import hf_scaling
from dapo_jax.models.weights import Weight
from dapo_jax.parallel.sharding import fetch

MAX_SHARD_BYTES = 5 * 10**9
METADATA = {"format": "pt"}  # transformers reads no file without it
# keys of a model's own config that do not hold for weights of ours, besides those of `_of_weights`
STALE = "quantization_config", "auto_map", "original_max_position_embeddings", "partial_rotary_factor"


def write_safetensors(
    directory: str | Path,
    table: Sequence[Weight],
    params: dict[str, Any],
    *,
    dtype: Any,
    name: str = "model",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    on_tensor: Callable[[int], object] = lambda num_bytes: None,
) -> None:
    """Writes `params` as `directory`/`name`.safetensors, or as shards of at most `max_shard_bytes` and their index.

    Every process must call it, since arrays may be sharded over processes; process 0 writes. The host holds one leaf
    and one file at a time. A file gets its name once it is complete; the index comes last.

    Args:
        table: the weights that `params` consists of.
        dtype: of the tensors in the files; bfloat16 rounds to the nearest.
        on_tensor: is called with the bytes of each tensor.

    Raises:
        ValueError: `params` has other leaves than `table`.
    """
    directory, dtype = Path(directory), np.dtype(dtype)
    tensors = (tensor for _, tensor in named_tensors(table, leaves_of(table, params), dtype, on_tensor))
    if jax.process_index() != 0:
        for _ in tensors:
            pass
        return
    shards = _deal_out(table, dtype, max_shard_bytes)
    files = [f"{name}-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    files = files if len(shards) > 1 else [f"{name}.safetensors"]
    for file, shard in zip(files, shards, strict=True):
        with _whole_file(directory / file) as path:
            save_file(dict(zip(shard, tensors, strict=False)), path, metadata=METADATA)
    if len(shards) > 1:
        weight_map = {tensor: file for file, shard in zip(files, shards, strict=True) for tensor in shard}
        total = sum(math.prod(weight.shape) * weight.stored_dtype(dtype).itemsize for weight in table)
        index = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n"
        with _whole_file(directory / f"{name}.safetensors.index.json") as path:
            path.write_text(index, encoding="utf-8")


def _deal_out(table: Sequence[Weight], dtype: np.dtype, max_shard_bytes: int) -> list[list[str]]:
    """The tensor names of each file, in the order of the table."""
    shards: list[list[str]] = [[]]
    filled = 0
    for weight, *_ in _leaves_of_tensors(table):
        size = math.prod(weight.file_shape) * weight.stored_dtype(dtype).itemsize
        for tensor in weight.tensors:
            if shards[-1] and filled + size > max_shard_bytes:
                shards.append([])
                filled = 0
            shards[-1].append(tensor)
            filled += size
    return shards


def leaves_of(table: Sequence[Weight], params: dict[str, Any]) -> dict[tuple[str, ...], Any]:
    """The parameters by path. ValueError: they are not the weights of the table."""
    leaves: Any = traverse_util.flatten_dict(params)
    found = {(path, tuple(leaf.shape)) for path, leaf in leaves.items()}
    expected = {(weight.path, tuple(weight.shape)) for weight in table}
    if found != expected:
        raise InputError(
            f"the parameters must be the weights of the table: missing {sorted(expected - found)}, "
            f"unknown {sorted(found - expected)}: take both from one architecture"
        )
    return leaves


def named_tensors(
    table: Sequence[Weight], leaves: dict[tuple[str, ...], Any], dtype: np.dtype, on_tensor: Callable[[int], object]
) -> Iterator[tuple[str, np.ndarray]]:
    """What `write_safetensors` writes, in the order of the table. Every process must exhaust it; only 0 gets any."""
    for weights in _leaves_of_tensors(table):
        whole = [_whole(leaves[weight.path]) for weight in weights]
        if jax.process_index() != 0:
            continue
        tensors = as_stored(weights[0], whole, weights[0].stored_dtype(dtype))
        for name, tensor in zip(weights[0].tensors, tensors, strict=True):
            yield name, tensor
            on_tensor(tensor.nbytes)


def _leaves_of_tensors(table: Sequence[Weight]) -> Iterator[list[Weight]]:
    """The weights that are stored in the same tensors: most are alone."""
    return (list(weights) for _, weights in itertools.groupby(table, lambda weight: weight.hf_name))


def as_stored(weight: Weight, leaves: Sequence[np.ndarray], dtype: np.dtype) -> Iterator[np.ndarray]:
    """Leaves, one unless they take turns, as Hugging Face's tensors; copies, so that none keeps the leaves alive."""
    if weight.turns[1]:
        for parts in zip(*leaves, strict=True):
            yield np.stack(parts, axis=-1).reshape(weight.file_shape).astype(dtype, order="C")
        return
    shape = weight.hf_shape[::-1] if weight.transposed else weight.hf_shape
    for part in leaves[0].reshape(-1, *shape):
        yield (part.T if weight.transposed else part).astype(dtype, order="C")


def _whole(leaf: Any) -> np.ndarray:
    """The leaf on the host. JAX caches what it fetches as long as the array lives, hence the copy."""
    return fetch(leaf.copy())


@contextmanager
def _whole_file(path: Path) -> Iterator[Path]:
    """A temporary file, renamed to `path` if nothing goes wrong."""
    partial = path.with_name(path.name + ".partial")
    partial.touch()
    mode = partial.stat().st_mode
    yield partial
    partial.chmod(mode)  # safetensors lets only the owner read what it writes
    partial.replace(path)


def with_weights(config: Mapping[str, Any], arch: Architecture, dtype: str) -> dict[str, Any]:
    """A Hugging Face config that was read as `arch`, for weights of ours in `dtype`.

    transformers 4 and 5 and vLLM read it likewise.
    """
    kept = {key: value for key, value in config.items() if key not in STALE}
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    return kept | _of_weights(arch, FAMILIES[arch.family], dtype, rope)


def _of_weights(arch: Architecture, family: Family, dtype: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that depend on who wrote the weights: each in the spelling of transformers 4 and vLLM, and of 5."""
    scaling = None if arch.rope_scaling is None else hf_scaling(arch.rope_scaling, given)
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
        thetas = [kind.theta for kind in arch.kinds if kind.window is not None]
        local = next((theta for theta in thetas if theta is not None), arch.rope_theta)
        config["rope_parameters"] = {FULL: rope, SLIDING: {"rope_theta": local, "rope_type": "default"}}
        config |= {} if family.local_theta == "rope_theta" else {family.local_theta: local}
    if "num_nextn_predict_layers" in family.defaults:
        config["num_nextn_predict_layers"] = 0  # those layers are not read
    if arch.rotary_size or family.rotary_share != 1.0:
        share = (arch.rotary_size or arch.head_dim) / arch.head_dim
        rope["partial_rotary_factor"] = config["partial_rotary_factor"] = share
    rope |= {key: value for key, value in given.items() if key.startswith("mrope")}  # places of images, also of text's
    if arch.experts is not None and "n_routed_experts" not in family.defaults:
        config |= dict.fromkeys(("num_experts", "num_local_experts"), arch.experts.number)
    return config
