"""Host: the files of a model directory: their JSON and its numbers, and the error for a file that cannot be read."""

import json
import math
from pathlib import Path
from typing import Any

from etils import epath

from dapo_jax.errors import InputError

LFS_POINTER = b"version https://git-lfs"
MAX_SIZE = 2**31 - 1


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. ValueError names the file that holds something else."""
    try:
        value = json.loads(path.read_bytes().decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise unreadable(path, error) from error
    if not isinstance(value, dict):
        raise InputError(f"{path} must hold a JSON object, not a {type(value).__name__}: download it again")
    return value


def read_if_there(file: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no file."""
    return read_object(file) if file.is_file() else {}


def unreadable(path: Path | epath.Path, error: Exception) -> InputError:
    """The error for a file that its format's reader rejects, with the fix."""
    with path.open("rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            return InputError(f"{path} is a Git LFS pointer, not the file itself: run 'git lfs pull'")
    reason = str(error)[:300] or type(error).__name__
    return InputError(f"{path} is damaged or incomplete ({reason}): download it again")


def is_size(value: Any) -> bool:
    """Whether `value` can be the size of something."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_SIZE


def is_positive_number(value: Any) -> bool:
    """Whether `value` is a finite number above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
