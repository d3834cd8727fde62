"""Host: the directory that a command writes, which gets its name only when it is complete."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dapo_jax.config.places import is_address
from dapo_jax.errors import InputError
from dapo_jax.parallel.processes import gather, is_first


def new_output(path: str | Path) -> Path:
    """The directory `path`, absolute. Every process must call it.

    Raises:
        InputError: it is not on this machine, or exists and is not empty.
    """
    if is_address(str(path)):
        raise InputError(f"--output={path} must be a directory on this machine: copy it to the bucket afterwards")
    output = Path(path).expanduser().absolute()
    if is_written(output):
        raise InputError(f"--output={output} must be a new or an empty directory: choose another name, or empty it")
    return output


def is_written(output: Path) -> bool:
    """Whether `output` exists and is not empty, as process 0 sees it. Every process must call it."""
    return gather(output.exists() and not (output.is_dir() and next(output.iterdir(), None) is None))[0]


@contextmanager
def output_directory(output: Path) -> Iterator[Path]:
    """A directory to write to, OUTPUT.partial, which is renamed to `output` on success.

    Every process must enter it; process 0 writes. What a killed command has left there is removed.

    Raises:
        InputError: `output` is a directory that cannot be replaced, for example a mounted volume.
    """
    partial = output.with_name(f"{output.name}.partial")
    if is_first():
        if output.exists():
            _remove_empty(output)
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
    yield partial
    if is_first():
        partial.rename(output)


def _remove_empty(output: Path) -> None:
    try:
        output.rmdir()
    except OSError as error:
        raise InputError(f"--output={output} cannot be replaced ({error}): name a new directory inside it") from error
