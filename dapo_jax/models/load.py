"""Host: a model from a path, which is a Hugging Face model directory or a GGUF file."""

from pathlib import Path
from typing import Any

from dapo_jax.errors import InputError
from dapo_jax.models.architecture import Architecture
from dapo_jax.models.assemble import Place
from dapo_jax.models.gguf_architecture import read_gguf_architecture
from dapo_jax.models.gguf_files import gguf_context_length, load_gguf
from dapo_jax.models.hf_architecture import read_architecture
from dapo_jax.models.model_files import read_object
from dapo_jax.models.safetensors_files import load_safetensors


def read_model_architecture(path: str | Path) -> Architecture:
    """The architecture of the model at `path`. ValueError names what is missing or not supported."""
    return read_gguf_architecture(path) if is_gguf(path) else read_architecture(path)


def load_params(path: str | Path, arch: Architecture, place: Place) -> dict[str, Any]:
    """The float32 parameters of the model at `path`, each leaf handed to `place` as soon as it is complete."""
    return load_gguf(path, arch, place) if is_gguf(path) else load_safetensors(path, arch, place)


def context_length(path: str | Path) -> int | None:
    """The context length in tokens of the model at `path`; None if its files do not say."""
    if is_gguf(path):
        return gguf_context_length(path)
    length = read_object(Path(path) / "config.json").get("max_position_embeddings")
    return length if isinstance(length, int) else None


def is_gguf(path: str | Path) -> bool:
    """True for a GGUF file, False for a directory; ValueError for anything else."""
    path = Path(path)
    if path.is_file() and path.suffix == ".gguf":
        return True
    if path.is_dir():
        return False
    state = "is neither" if path.exists() else "does not exist"
    raise InputError(f"the model path {path} {state}: give a Hugging Face model directory or a .gguf file")
