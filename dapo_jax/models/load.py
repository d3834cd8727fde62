"""Host: a model from its Hugging Face directory."""

from pathlib import Path
from typing import Any

from dapo_jax.data.model_files import read_object
from dapo_jax.errors import InputError
from dapo_jax.hub.names import GGUF, is_gguf
from dapo_jax.models.architecture import Architecture
from dapo_jax.models.assemble import Place
from dapo_jax.models.hf_architecture import read_architecture
from dapo_jax.models.safetensors_files import load_safetensors


def read_model_architecture(path: str | Path) -> Architecture:
    """The architecture of the model at `path`. ValueError names what is missing or not supported."""
    return read_architecture(_directory(path))


def load_params(path: str | Path, arch: Architecture, place: Place) -> dict[str, Any]:
    """The float32 parameters of the model at `path`, each leaf handed to `place` as soon as it is complete."""
    return load_safetensors(_directory(path), arch, place)


def context_length(path: str | Path) -> int | None:
    """The context length in tokens of the model at `path`; None if its files do not say."""
    length = read_object(_directory(path) / "config.json").get("max_position_embeddings")
    return length if isinstance(length, int) else None


def _directory(path: str | Path) -> Path:
    path = Path(path)
    if not path.is_dir():
        state = "is a file" if path.exists() else "does not exist"
        raise InputError(f"the model path {path} {GGUF if is_gguf(path) else f'{state}: give a model directory'}")
    return path
