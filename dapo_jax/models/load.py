"""Host: parameters from the safetensors files of a Hugging Face model directory, checked, one leaf at a time."""

import gc
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from safetensors import SafetensorError, safe_open

from dapo_jax.data.model_files import read_if_there, read_object, unreadable
from dapo_jax.errors import InputError
from dapo_jax.models import mxfp4
from dapo_jax.models.architecture import Architecture
from dapo_jax.models.hf_architecture import model_directory, text_part
from dapo_jax.models.weights import Weight, unflatten, weight_table

logger = logging.getLogger(__name__)

Place = Callable[[Weight, np.ndarray], jax.Array]
# Of each tensor in a file, its weights, and the element where each begins.
StoredPlaces = dict[str, list[tuple[str, int]]]
MAX_PROBLEMS = 10
ROWS = 4096  # of a table, compared at once
DTYPES = ("F32", "F16", "BF16")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ROTARY_BUFFER = "rotary_emb.inv_freq"  # written by old versions of transformers; derived, not a weight
TEXT = {"language_model.model.": "model.", "language_model.lm_head.": "lm_head.", "model.language_model.": "model."}
PARTS = "vision_tower", "multi_modal_projector", "visual"
VISION = tuple(f"{start}{part}." for start in ("", "model.") for part in PARTS)
PARTS_OF_EXPERTS = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}
AFTER_NEXT = "layers that predict tokens after the next"


class _Tensor(NamedTuple):
    """A tensor in an open file."""

    file: Any
    stored: str  # its name there

    def header(self) -> Any:
        """What reads its shape, its dtype or a part of it."""
        return self.file.get_slice(self.stored)

    def read(self) -> np.ndarray:
        return self.file.get_tensor(self.stored)


class _Expert(NamedTuple):
    """An expert's matrix in a tensor [E, outputs, inputs] of all experts, in which gate is above up."""

    whole: _Tensor
    number: int
    half: int  # 0 = gate, 1 = up, -1 = all rows

    def header(self) -> "_Expert":
        return self

    def get_dtype(self) -> str:
        return self.whole.header().get_dtype()

    def get_shape(self) -> tuple[int, ...]:
        _, rows, columns = self.whole.header().get_shape()
        return (rows if self.half < 0 else rows // 2), columns

    @property
    def begin(self) -> int:
        """Where it begins in the tensor of all, in elements."""
        rows, columns = self.get_shape()
        return (self.number * (1 if self.half < 0 else 2) + max(self.half, 0)) * rows * columns

    def read(self) -> np.ndarray:
        rows, begin = self.get_shape()[0], max(self.half, 0)
        return self.whole.header()[self.number : self.number + 1][0, begin * rows : (begin + 1) * rows]


def load_params(path: str | Path, arch: Architecture, place: Place) -> dict[str, Any]:
    """The float32 parameters of `arch` from model.safetensors in the directory `path`, or from the shards of its index.

    The host holds one leaf (of stacked weights: all layers of one projection) and one tensor at a time.

    Args:
        place: puts one whole leaf on the devices.

    Raises:
        ValueError: files that are missing or damaged; tensors that are missing, unknown, misshapen or of another dtype
            than DTYPES, up to ten together; or a tensor with a value that is not finite.
    """
    directory = model_directory(path)
    with _opened(directory, arch) as tensors:
        return unflatten(_placed_leaves(directory, arch, tensors, place))


def stored_places(path: str | Path, arch: Architecture) -> StoredPlaces:
    """Which weights of `arch` the tensors in the files of `path` hold. ValueError: see `load_params`."""
    places: StoredPlaces = {}
    with _opened(model_directory(path), arch) as tensors:
        for name, one in tensors.items():
            stored, begin = (one.whole.stored, one.begin) if isinstance(one, _Expert) else (one.stored, 0)
            places.setdefault(stored, []).append((name, begin))
    return places


@contextmanager
def _opened(directory: Path, arch: Architecture) -> Iterator[dict[str, Any]]:
    """The weights of `arch` in the files of a directory, by name, checked."""
    raw = read_if_there(directory / "config.json")
    hf = text_part(raw)
    takes_images, after = hf is not raw, hf.get("num_nextn_predict_layers") or 0
    without = dict.fromkeys(VISION, "images") if takes_images else {}
    without |= {f"model.layers.{arch.num_layers + i}.": AFTER_NEXT for i in range(after)}
    without |= {"mtp.": AFTER_NEXT} if arch.delta else {}
    tensors: dict[str, _Tensor] = {}
    problems, left_out = [], Counter[str]()
    with ExitStack() as stack:
        for weights in weight_files(directory):
            file = stack.enter_context(_open(weights))
            for stored in file.keys():
                name = text_name(stored) if takes_images else stored
                if part := next((part for start, part in without.items() if name.startswith(start)), ""):
                    left_out[part] += 1
                if part or name.endswith(ROTARY_BUFFER):
                    continue
                problems += [f"tensor {name} is in more than one file"] if name in tensors else []
                tensors[name] = _Tensor(file, stored)
        whole = _apart(mxfp4.joined(tensors), arch)
        problems += _mismatches({name: one.header() for name, one in whole.items()}, arch)
        if problems:
            more = [f"and {len(problems) - MAX_PROBLEMS} more"] if len(problems) > MAX_PROBLEMS else []
            raise InputError(
                f"{directory} must hold the weights of the model that it describes (take both from one download): "
                + "; ".join(problems[:MAX_PROBLEMS] + more)
            )
        for part, count in left_out.items():
            logger.info("%s: %d tensors of %s are not read", directory, count, part)
        yield whole


def text_name(stored: str) -> str:
    """The name in a language model of a tensor of a model that also takes images."""
    return next((name + stored.removeprefix(start) for start, name in TEXT.items() if stored.startswith(start)), stored)


def _apart(tensors: Mapping[str, Any], arch: Architecture) -> dict[str, Any]:
    """`tensors`, with one for each expert in the place of those that hold all experts of a layer, as Qwen3.5's do."""
    found = dict(tensors)
    if arch.experts is None or arch.experts.biases:
        return found
    for name, parts in ((name, PARTS_OF_EXPERTS.get(name.rpartition(".experts.")[2])) for name in tensors):
        shape = tensors[name].header().get_shape() if parts else ()
        if not parts or len(shape) != 3 or shape[0] != arch.experts.number or shape[1] % len(parts):
            continue
        whole, stem = found.pop(name), name.rpartition(".")[0]
        for number in range(arch.experts.number):
            for half, part in enumerate(parts):
                one = _Expert(whole, number, half if len(parts) > 1 else -1)
                found[f"{stem}.{number}.{part}_proj.weight"] = one
    return found


def weight_files(directory: Path) -> list[Path]:
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.exists():
        raise InputError(
            f"{directory} holds neither {single.name} nor {index.name}: "
            "model.path must hold the weights as safetensors; convert other formats first"
        )
    names = read_object(index).get("weight_map")
    if not isinstance(names, dict) or not all(name == Path(str(name)).name for name in names.values()):
        raise InputError(f"{index} must have a weight_map from tensors to files in its directory: download it again")
    files = [directory / name for name in sorted(set(names.values()))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise InputError(f"{index} names files that do not exist: {missing}: download them into {directory}")
    return files


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise unreadable(path, error) from error


def _mismatches(tensors: Mapping[str, Any], arch: Architecture) -> Iterator[str]:
    """What sets the stored tensors apart from the weights of `arch`.

    Args:
        tensors: their headers, which read a part of a tensor.
    """
    expected = {name: weight.file_shape for weight in weight_table(arch) for name in weight.tensors}
    for name, tensor in tensors.items():
        if tensor.get_dtype() not in DTYPES:
            yield f"tensor {name} has dtype {tensor.get_dtype()}, expected one of {DTYPES}"
    if arch.tie_embeddings and not arch.scalar_head and not _are_equal(tensors.get(HEAD), tensors.get(EMBEDDING)):
        yield (
            f"tensor {HEAD} differs from {EMBEDDING}, but config.json has tie_word_embeddings=true: set it to "
            f"false there, as transformers does on its own, or remove {HEAD}"
        )
    for name, shape in expected.items():
        if name not in tensors:
            yield f"tensor {name} of shape {shape} is missing"
    if arch.tie_embeddings:  # models of Hugging Face may store the head a second time: it is not read
        expected[HEAD] = arch.vocab_size, arch.hidden_size
    for name, tensor in tensors.items():
        found = tuple(tensor.get_shape())
        if name not in expected:
            yield f"tensor {name} of shape {found} is unknown"
        elif found != expected[name]:
            yield f"tensor {name} has shape {found}, expected {expected[name]}"


def _are_equal(first: Any, second: Any) -> bool:
    """Whether two tensors, read by parts, hold the same numbers; also True unless both exist in one shape."""
    if first is None or second is None or first.get_shape() != second.get_shape():
        return True
    length = first.get_shape()[0]
    parts = (slice(row, min(row + ROWS, length)) for row in range(0, length, ROWS))
    return all(np.array_equal(first[part], second[part]) for part in parts)


def _placed_leaves(
    directory: Path, arch: Architecture, tensors: Mapping[str, _Tensor | mxfp4.Mxfp4Tensor], place: Place
) -> Iterator[tuple[Weight, jax.Array]]:
    for weight in weight_table(arch):
        placed = jax.block_until_ready(place(weight, _read_leaf(directory, weight, tensors)))
        gc.collect(generation=0)  # only this makes JAX free its copy on the host
        yield weight, placed


def _read_leaf(directory: Path, weight: Weight, tensors: Mapping[str, _Tensor | mxfp4.Mxfp4Tensor]) -> np.ndarray:
    leaf = np.empty(weight.shape, np.float32)
    shape = weight.kept(np.empty(weight.file_shape, np.bool_)).shape
    for part, name in zip(leaf.reshape(-1, *shape), weight.tensors, strict=True):
        part[...] = weight.kept(tensors[name].read())
        if not np.isfinite(part).all():
            raise InputError(
                f"{directory}: {np.count_nonzero(~np.isfinite(part))} of {part.size} values of tensor {name} are NaN "
                "or infinite: download the model again, or take an earlier checkpoint of the run that wrote it"
            )
    return leaf
