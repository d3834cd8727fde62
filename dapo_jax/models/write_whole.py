"""Host: the files of a model that also takes images, with the weights of its text part replaced.

A file of safetensors is the length of its header (8 bytes), the header (JSON: dtype, shape and place of each tensor),
and the tensors one after the other. Here the headers are written first, then what stays as it is, then each weight at
its place: the host holds one leaf, however leaves and files divide the tensors.
"""

import json
import math
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import jax
import numpy as np

from dapo_jax.data.model_files import read_object
from dapo_jax.errors import InputError
from dapo_jax.models.architecture import Architecture
from dapo_jax.models.hf_architecture import takes_images
from dapo_jax.models.load import EMBEDDING, HEAD, stored_places, weight_files
from dapo_jax.models.weights import Weight, weight_table
from dapo_jax.models.write_safetensors import named_tensors, whole_file

CODES = {"float32": "F32", "bfloat16": "BF16"}  # dtypes in a header
CHUNK = 2**24  # bytes, copied at once
METADATA = "__metadata__"


class _Place(NamedTuple):
    """Where a tensor goes."""

    file: BinaryIO
    begin: int


def check_whole(source: Path, arch: Architecture, path: str) -> None:
    """Raises InputError unless the directory `source` of model.path=`path` is a model whose other parts can be kept."""
    if not takes_images(source):
        raise InputError(f"--keep-vision: {path} is a language model without a part for images: leave it out")
    raw = read_object(source / "config.json")
    if any("quantization_config" in part for part in (raw, raw["text_config"])):
        raise InputError(
            f"--keep-vision: config.json of {path} has quantization_config, which does not hold for the trained text "
            "part: leave it out, or train the model that is not quantized"
        )
    stored_places(source, arch)


def whole_config(source: Path, dtype: str) -> dict[str, Any]:
    """The model's config.json, which names `dtype` where it names one."""
    raw = read_object(source / "config.json")
    named = [{key: dtype for key in ("dtype", "torch_dtype") if key in part} for part in (raw, raw["text_config"])]
    return {**raw, **named[0], "text_config": {**raw["text_config"], **named[1]}}


def write_whole(
    directory: Path,
    source: Path,
    arch: Architecture,
    params: dict[str, Any],
    *,
    dtype: str,
    on_tensor: Callable[[int], object] = lambda num_bytes: None,
) -> None:
    """Writes the files of weights in `source` to `directory`, with `params` in the place of its text part.

    Names and files of tensors stay; others than the text part's are copied byte for byte. See `write_safetensors`.
    """
    table = weight_table(arch)
    tensors = named_tensors(table, params, np.dtype(dtype), on_tensor)
    if jax.process_index() != 0:
        for _ in tensors:
            pass
        return
    weights = {name: weight for weight in table for name in weight.tensors}
    twice = set() if HEAD in weights else {HEAD}  # some store the embedding a second time
    weights |= dict.fromkeys(twice, weights[EMBEDDING])
    held, places, total = stored_places(source, arch), dict[str, _Place](), 0
    with ExitStack() as stack:
        for path in weight_files(source):
            file = stack.enter_context(stack.enter_context(whole_file(directory / path.name)).open("wb"))
            found, size = _write_rest(path, file, held, weights, np.dtype(dtype))
            places, total = places | found, total + size
        for name, tensor in tensors:
            for one in {name, *(twice & places.keys() if name == EMBEDDING else ())}:
                places[one].file.seek(places[one].begin)
                places[one].file.write(tensor.reshape(-1).view(np.uint8).data)
    index = source / "model.safetensors.index.json"
    if index.exists():
        given = read_object(index)
        given["metadata"] = {**(given.get("metadata") or {}), "total_size": total}
        (directory / index.name).write_text(json.dumps(given, indent=2) + "\n", encoding="utf-8")


def _write_rest(
    path: Path,
    target: BinaryIO,
    held: dict[str, list[tuple[str, int]]],
    weights: dict[str, Weight],
    dtype: np.dtype,
) -> tuple[dict[str, _Place], int]:
    """Writes the file `path` without the weights `held` in it; returns their places, and the bytes of its tensors."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        tensors = {name: dict(entry) for name, entry in header.items() if name != METADATA}
        sizes, counts = dict[str, int](), {name: math.prod(entry["shape"]) for name, entry in tensors.items()}
        for name, entry in tensors.items():
            begin, end = entry["data_offsets"]
            sizes[name] = end - begin
            if name in held:
                stored = weights[held[name][0][0]].stored_dtype(dtype)
                entry["dtype"], sizes[name] = CODES[stored.name], counts[name] * stored.itemsize
        # The widest numbers first, so that each begins at a multiple of its size.
        order = sorted(tensors, key=lambda name: -sizes[name] / max(counts[name], 1))
        end, begins = 0, dict[str, int]()
        for name in order:
            begins[name], end = end, end + sizes[name]
            tensors[name]["data_offsets"] = [begins[name], end]
        kept = {METADATA: header[METADATA]} if METADATA in header else {}
        text = json.dumps(kept | {name: tensors[name] for name in order}, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        target.write(len(text).to_bytes(8, "little") + text)
        target.truncate(8 + len(text) + end)
        places: dict[str, _Place] = {}
        for name in order:
            start = 8 + len(text) + begins[name]
            for weight, begin in held.get(name, ()):
                places[weight] = _Place(target, start + begin * weights[weight].stored_dtype(dtype).itemsize)
            if name not in held:
                file.seek(8 + length + header[name]["data_offsets"][0])
                target.seek(start)
                _copy(file, target, sizes[name])
    return places, end


def _copy(source: BinaryIO, target: BinaryIO, size: int) -> None:
    while size:
        part = source.read(min(size, CHUNK))
        size -= target.write(part)
