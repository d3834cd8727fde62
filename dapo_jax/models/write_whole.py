"""Host: the files of a model that also takes images, with the weights of its text part replaced.

A file of safetensors is the length of its header (8 bytes), the header (JSON: dtype, shape and place of each tensor),
and the tensors one after the other. Here the headers are written first, then what stays as it is, then each weight at
its place: the host holds one leaf, however leaves and files divide the tensors.
"""

import json
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import jax
import numpy as np

from dapo_jax.data.model_files import read_object
from dapo_jax.errors import InputError
from dapo_jax.models.architecture import Architecture
from dapo_jax.models.hf_architecture import takes_images
from dapo_jax.models.load import EMBEDDING, StoredPlaces, stored_places, weight_files
from dapo_jax.models.weights import Weight
from dapo_jax.models.write_safetensors import leaves_of, named_tensors

CODES = {"float32": "F32", "bfloat16": "BF16"}  # dtypes in a header
CHUNK = 2**24  # bytes, copied at once
METADATA = "__metadata__"
Place = tuple[BinaryIO, int]  # a file, and where in it a tensor begins


def check_whole(source: Path, arch: Architecture, path: str) -> None:
    """Raises InputError unless the directory `source` of model.path=`path` has parts that can be kept."""
    if not takes_images(source):
        raise InputError(f"--keep-vision: {path} has no part for images: leave it out")
    stored_places(source, arch)


def whole_config(source: Path, dtype: str) -> dict[str, Any]:
    """The model's config.json, with `dtype` where it names one."""
    raw = read_object(source / "config.json")
    top, text = ({key: dtype for key in ("dtype", "torch_dtype") if key in part} for part in (raw, raw["text_config"]))
    return {**raw, **top, "text_config": {**raw["text_config"], **text}}


def write_whole(
    directory: Path,
    table: Sequence[Weight],
    params: dict[str, Any],
    *,
    source: Path,
    arch: Architecture,
    dtype: Any,
    on_tensor: Callable[[int], object],
) -> None:
    """Writes the weights in `source` to `directory`, those of its text part from `params`; see `write_safetensors`.

    Names and files of tensors stay; what is not the text part's is copied byte for byte.
    """
    dtype = np.dtype(dtype)
    tensors = named_tensors(table, leaves_of(table, params), dtype, on_tensor)
    if jax.process_index() != 0:
        for _ in tensors:
            pass
        return
    weights = {name: weight for weight in table for name in weight.tensors}
    held, places, total = stored_places(source, arch), dict[str, Place](), 0
    twice = {weight for found in held.values() for weight, _ in found} - weights.keys()  # the embedding, as the head
    weights |= dict.fromkeys(twice, weights[EMBEDDING])
    with ExitStack() as stack:
        for path in weight_files(source):
            file = stack.enter_context((directory / path.name).open("wb"))
            found, size = _write_rest(path, file, held, weights, dtype)
            places, total = places | found, total + size
        for name, tensor in tensors:
            for one in (name, *(twice if name == EMBEDDING else ())):
                file, begin = places[one]
                file.seek(begin)
                file.write(tensor.reshape(-1).view(np.uint8).data)
    index = source / "model.safetensors.index.json"
    if index.exists():
        given = read_object(index)
        given["metadata"] = {**(given.get("metadata") or {}), "total_size": total}
        (directory / index.name).write_text(json.dumps(given, indent=2) + "\n", encoding="utf-8")


def _write_rest(
    path: Path, target: BinaryIO, held: StoredPlaces, weights: dict[str, Weight], dtype: np.dtype
) -> tuple[dict[str, Place], int]:
    """Writes the file `path` without the weights `held` in it; returns their places, and the bytes of its tensors."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        before = json.loads(file.read(length))
        header = {METADATA: before.pop(METADATA, {})}
        counts, end = {name: max(math.prod(entry["shape"]), 1) for name, entry in before.items()}, 0
        sizes = {name: entry["data_offsets"][1] - entry["data_offsets"][0] for name, entry in before.items()}
        for name in before.keys() & held.keys():
            stored = weights[held[name][0][0]].stored_dtype(dtype)
            before[name]["dtype"], sizes[name] = CODES[stored.name], counts[name] * stored.itemsize
        # The widest numbers first, so that each begins at a multiple of its size.
        for name in sorted(before, key=lambda name: -sizes[name] / counts[name]):
            header[name] = before[name] | {"data_offsets": [end, end + sizes[name]]}
            end += sizes[name]
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        target.write(len(text).to_bytes(8, "little") + text)
        target.truncate(8 + len(text) + end)
        places: dict[str, Place] = {}
        for name in before:
            start, after = (8 + len(text) + offset for offset in header[name]["data_offsets"])
            for weight, begin in held.get(name, ()):
                places[weight] = target, start + begin * weights[weight].stored_dtype(dtype).itemsize
            if name in held:
                continue
            file.seek(8 + length + before[name]["data_offsets"][0])
            target.seek(start)
            while start < after:
                start += target.write(file.read(min(CHUNK, after - start)))
    return places, end
