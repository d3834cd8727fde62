"""Host: config files: a recipe that comes with the package by its name, Python with get_config(), YAML, JSON such as a
run's config.json.
"""

import ast
import json
import re
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from flax import traverse_util
from ml_collections import ConfigDict

from dapo_jax import __version__
from dapo_jax.config.places import is_address, place_of
from dapo_jax.config.values import DEFAULTS, default_config
from dapo_jax.errors import InputError, did_you_mean

_PACKAGE, _CHECKOUT = Path(__file__).parents[1:3]  # setup.py puts configs/ and scripts/launch/ into the package
FOLDER = found if (found := _PACKAGE / "recipes").is_dir() else _CHECKOUT / "configs"
LAUNCHERS = found if (found := _PACKAGE / "launchers").is_dir() else _CHECKOUT / "scripts" / "launch"
SHAPES = FOLDER / "shapes"  # config.json of well-known models, which the preflight reads
EXAMPLE = (
    "give a recipe (`dapo-jax configs` lists them), for example --config tiny, or a config file, for example --config "
    "mine.py or the config.json of a run"
)
_NO_KEY = re.compile(r'^[\'"]?Key "(\w+)" does not exist')  # how ml_collections refuses one


def recipes() -> dict[str, str]:
    """Each recipe, a Python file of the package without .py, with the first line of its docstring."""
    return {name: text.partition("\n")[0] for name, text in docstrings().items()}


def docstrings() -> dict[str, str]:
    """The docstring of each recipe."""
    files = {file.stem: ast.parse(file.read_text(encoding="utf-8")) for file in sorted(FOLDER.glob("*.py"))}
    return {name: ast.get_docstring(file) or "" for name, file in files.items()}


def recipe_file(name: str) -> Path | None:
    """The file of the recipe of that name; None if there is none."""
    return FOLDER / f"{name}.py" if name in {file.stem for file in FOLDER.glob("*.py")} else None


def closest(name: str) -> str:
    """A question in brackets that names the recipes with a similar name; "" if there are none."""
    meant = did_you_mean(name, (file.stem for file in FOLDER.glob("*.py")))
    return f" ({meant})" if meant else ""


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
    return _run_text(path) if place.suffix in READERS else _run_python(path)


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
        if missing := _NO_KEY.search(str(error)):
            names = {key: key.rpartition(".")[2] for key in DEFAULTS}
            same = [key for key, name in names.items() if name == missing[1]]
            meant = f"did you mean {' or '.join(same)}?" if same else did_you_mean(missing[1], names.values())
            cure = f"{meant} correct the file".lstrip()
            raise InputError(f"{rule}, but there is no key {missing[1]}{where}; {cure}") from None
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


class _YamlLoader(yaml.SafeLoader):
    """Plain values only, with 1e-6 as a number, which YAML 1.1 reads as text."""


_NUMBER = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$")
_YamlLoader.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+0123456789"))


def _read_yaml(text: str) -> Any:
    loader = _YamlLoader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


READERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    ".json": ("JSON", json.loads),
    **dict.fromkeys((".yaml", ".yml"), ("YAML", _read_yaml)),
}


def _run_text(path: str) -> ConfigDict:
    """The defaults with the changes of a JSON or YAML object of sections."""
    place, config = place_of(path), default_config()
    language, read = READERS[place.suffix]
    rule = f"--config={path} must be a {language} object of options, such as the config.json of a run"
    try:
        values = read(place.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise InputError(f"{rule}, but is not {language} ({error}): correct the file") from error
    if not isinstance(values, dict):
        raise InputError(f"{rule}, but holds {type(values).__name__}: correct the file")
    known = traverse_util.flatten_dict(config.to_dict())
    unknown = [
        ".".join(map(str, path))
        for path in traverse_util.flatten_dict(values, is_leaf=lambda path, _: path in known)
        if path not in known
    ]
    if unknown:
        known = [".".join(path) for path in known]
        meant = {name: did_you_mean(name, known) for name in unknown[:10]}
        names = ", ".join(f"{name} ({cure})" if cure else name for name, cure in meant.items())
        raise InputError(f"{rule}, but has options unknown to dapo_jax {__version__}: {names}: correct the file")
    try:
        config.update(values)
    except (TypeError, AttributeError, ValueError) as error:
        raise InputError(f"{rule}: {error}: correct the file") from error
    if place.name == "config.json":
        config.workdir = str(place.parent) if is_address(path) else str(Path(path).parent)
    return config
