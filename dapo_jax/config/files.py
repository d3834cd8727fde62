"""Host: reads config files: a recipe by its name, Python with get_config(), or JSON such as a run's config.json."""

import json
import runpy
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flax import traverse_util
from ml_collections import ConfigDict

from dapo_jax.config.recipes import closest, recipe_file
from dapo_jax.config.values import default_config
from dapo_jax.errors import InputError
from dapo_jax.places import is_address, place_of

EXAMPLE = (
    "give a recipe (`dapo-jax configs` lists them), for example --config tiny, or a config file, for example --config "
    "mine.py or the config.json of a run"
)


def read_config_file(path: str) -> ConfigDict:
    """The options in a file, as a locked ConfigDict.

    For a run's config.json, `workdir` becomes the directory of the file, even if the run has been moved.

    Args:
        path: of the file, or the name of a recipe.

    Raises:
        InputError: the file does not exist, fails, or holds no config.
    """
    recipe = recipe_file(path)
    if recipe is not None:
        return _run_python(str(recipe))
    place = place_of(path)
    if not place.is_file():
        raise InputError(f"--config={path} is not a file and not a recipe{closest(path)}: {EXAMPLE}")
    return _run_json(path) if place.suffix == ".json" else _run_python(path)


def _run_python(path: str) -> ConfigDict:
    """What get_config() of a Python file returns."""
    rule = f"--config={path} must be a Python file whose get_config() returns default_config() with changes"
    if is_address(path):
        raise InputError(f"{rule}, on this machine: copy it here")
    file = str(place_of(path))
    try:
        with _neighbours(file):
            names = runpy.run_path(file)
            config = names["get_config"]() if "get_config" in names else None
    except (Exception, SystemExit) as error:  # a config file can raise anything
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        where = f" in line {lines[-1]}" if lines else ""
        raise InputError(
            f"{rule}, but it fails{where} with {type(error).__name__}: {error}: correct the file"
        ) from error
    if not isinstance(config, ConfigDict):
        found = f"returns {config!r}" if "get_config" in names else "has no get_config"
        raise InputError(f"{rule}, but it {found}: correct the file")
    return config


@contextmanager
def _neighbours(file: str) -> Iterator[None]:
    """Lets a config file import other files in its folder, as configs/grpo.py does. Installed packages win."""
    folder = str(Path(file).parent)
    sys.path.append(folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def _run_json(path: str) -> ConfigDict:
    """The defaults with the changes of a JSON object of sections."""
    rule = f"--config={path} must be a JSON object of options, such as the config.json of a run"
    place, config = place_of(path), default_config()
    try:
        values = json.loads(place.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{rule}, but is not JSON ({error}): correct the file") from error
    if not isinstance(values, dict):
        raise InputError(f"{rule}, but holds {type(values).__name__}: correct the file")
    known = traverse_util.flatten_dict(config.to_dict())
    unknown = [
        ".".join(path)
        for path in traverse_util.flatten_dict(values, is_leaf=lambda path, _: path in known)
        if path not in known
    ]
    if unknown:
        raise InputError(f"{rule}, but has unknown options {', '.join(unknown[:10])}: correct the file")
    try:
        config.update(values)
    except (TypeError, AttributeError, ValueError) as error:
        raise InputError(f"{rule}: {error}: correct the file") from error
    if place.name == "config.json":
        config.workdir = str(place.parent) if is_address(path) else str(Path(path).parent)
    return config
