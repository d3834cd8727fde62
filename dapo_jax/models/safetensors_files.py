"""Host: parameters from the safetensors files of a Hugging Face model directory."""

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from dapo_jax.data.model_files import read_object, unreadable
from dapo_jax.errors import InputError
from dapo_jax.models.architecture import Architecture
from dapo_jax.models.assemble import Place, StoredTensor, assemble

ROWS = 4096  # of a table, compared at once
DTYPES = ("F32", "F16", "BF16")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ROTARY_BUFFER = "rotary_emb.inv_freq"  # written by old versions of transformers; derived, not a weight


def load_safetensors(directory: str | Path, arch: Architecture, place: Place) -> dict[str, Any]:
    """The float32 parameters of `arch` from `directory`/model.safetensors, or from the shards of its index.

    ValueError names files that are missing or damaged, and tensors that are missing, unknown, misshapen or of
    another dtype than float32, float16 and bfloat16.
    """
    directory = Path(directory)
    tensors: dict[str, StoredTensor] = {}
    headers: dict[str, Any] = {}  # read a part of a tensor
    problems = []
    with ExitStack() as stack:
        for path in _weight_files(directory):
            file = stack.enter_context(_open(path))
            for name in file.keys():
                if name.endswith(ROTARY_BUFFER):
                    continue
                if name in tensors:
                    problems.append(f"tensor {name} is in more than one file")
                header = headers[name] = file.get_slice(name)
                if header.get_dtype() not in DTYPES:
                    problems.append(f"tensor {name} has dtype {header.get_dtype()}, expected one of {DTYPES}")
                tensors[name] = StoredTensor(tuple(header.get_shape()), partial(file.get_tensor, name))
        # Hugging Face models with tied embeddings may store the head a second time.
        unused = {HEAD: (arch.vocab_size, arch.hidden_size)} if arch.tie_embeddings else {}
        if arch.tie_embeddings and not arch.scalar_head and not _are_equal(headers.get(HEAD), headers.get(EMBEDDING)):
            problems.append(
                f"tensor {HEAD} differs from {EMBEDDING}, but config.json has tie_word_embeddings=true: set it to "
                f"false there, as transformers does on its own, or remove {HEAD}"
            )
        return assemble(
            directory, arch, tensors, lambda weight: weight.hf_name, place, unused=unused, problems=problems
        )


def _are_equal(first: Any, second: Any) -> bool:
    """Whether two tensors, read by parts, hold the same numbers; also True unless both exist in one shape."""
    if first is None or second is None or first.get_shape() != second.get_shape():
        return True
    length = first.get_shape()[0]
    parts = (slice(row, min(row + ROWS, length)) for row in range(0, length, ROWS))
    return all(np.array_equal(first[part], second[part]) for part in parts)


def _weight_files(directory: Path) -> list[Path]:
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
