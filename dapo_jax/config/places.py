"""Host: where a run reads and writes: local paths, and Google Cloud Storage addresses such as gs://bucket/run."""

import fcntl
import os
import shutil
from pathlib import Path
from typing import Any

import fsspec
import fsspec.config
from etils import epath

from dapo_jax.errors import InputError

CACHE = Path(os.path.expanduser(os.environ.get("DAPO_JAX_CACHE") or "~/.cache/dapo_jax"))  # with ~ if there is no home
MODEL_FILES = (".json", ".safetensors", ".jinja", ".model", ".txt")  # of a model directory


def is_address(path: str) -> bool:
    """Whether `path` is in an object store rather than a file system of this machine."""
    return "://" in path


def address_problem(path: str) -> str | None:
    """Why the address `path` cannot be used here, and the fix. None if it can, or if `path` is not an address."""
    if not is_address(path):
        return None
    if not path.startswith("gs://") or ".." in path.split("/"):
        return f"{path} must be gs://BUCKET/NAME without .., or a path: mount other stores as a directory"
    try:
        fsspec.get_filesystem_class("gcs")
    except ImportError:
        return f"{path} needs the package gcsfs: pip install 'dapo_jax[gcs]'"
    return None


def place_of(path: str) -> epath.Path:
    """`path` for reading and writing: an address unchanged, a local path absolute and without ~.

    Raises:
        InputError: it is an address that cannot be used here.
    """
    problem = address_problem(path)
    if problem:
        raise InputError(problem)
    if not is_address(path):
        return epath.Path(expanded(path).absolute())
    fsspec.config.conf.setdefault("gcs", {})["use_listings_cache"] = False  # others write there too
    return epath.Path(path)


def expanded(path: str | Path) -> Path:
    """`path` with the home directory for ~. InputError if there is none: no HOME, and no entry for this user."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise InputError(
            f"{path} needs a home directory, which this user does not have: set HOME, or write the path without ~ "
            "(of the cache: DAPO_JAX_CACHE and trainer.compilation_cache_dir)"
        ) from error


def without_tilde(path: Any) -> Any:
    """`path`, or each of several, with ~ expanded. Values that are not text are left to the type check."""
    if isinstance(path, tuple):
        return tuple(map(without_tilde, path))
    return os.path.expanduser(path) if isinstance(path, str) else path


def copy_of(address: str, kind: str) -> Path:
    """Where this machine keeps its copy of the files at `address`."""
    return expanded(CACHE) / kind / address.partition("://")[2].strip("/")


def local_model(path: str) -> Path:
    """The model directory at `path` on this machine. An address is copied, again whenever it changes.

    Raises:
        InputError: no directory exists at the address.
        RuntimeError: there is no space for the copy.
    """
    if not is_address(path):
        return expanded(path)
    place = place_of(path)
    if not place.is_dir():
        raise InputError(f"the model path {path} does not exist: give a Hugging Face model directory")
    folder = copy_of(path, "models")
    _copy([file for file in place.iterdir() if file.suffix in MODEL_FILES], folder)
    return folder


def _copy(files: list[epath.Path], folder: Path) -> None:
    """Makes `folder` hold exactly `files`. One process per machine copies, the others wait for it."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(folder.name + ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = {file.name: (file, file.stat()) for file in files}
        for path in folder.iterdir():
            if path.is_dir() or path.suffix == ".lock":  # of a model at a longer address
                continue
            file, state = found.get(path.name, (None, None))
            if state is None or (path.stat().st_size, int(path.stat().st_mtime)) != (state.length, int(state.mtime)):
                path.unlink()
            else:
                del found[path.name]
        needed, free = sum(state.length for _, state in found.values()), shutil.disk_usage(folder).free
        if needed > free:
            raise RuntimeError(
                f"a copy of {files[0].parent} in {folder} needs {needed / 1e9:.2f} GB, but only {free / 1e9:.2f} GB "
                "are free: make room, or mount the bucket as a directory and give that path"
            )
        for name, (file, state) in found.items():
            part = folder / (name + ".part")
            file.copy(part, overwrite=True)
            os.utime(part, (state.mtime, state.mtime))
            os.replace(part, folder / name)
