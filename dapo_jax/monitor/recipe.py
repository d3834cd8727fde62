"""Host: what a run was started with: its options in `config.json`; the config file and the keys of the command line in
`recipe.json`; copies in `functions/` of the files of your own functions, with what has changed in them since.
"""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dapo_jax import __version__
from dapo_jax.config.own_functions import file_and_function
from dapo_jax.config.places import place_of
from dapo_jax.config.sections import Config
from dapo_jax.config.values import DEFAULTS, FORMER, flatten, from_values
from dapo_jax.errors import InputError
from dapo_jax.monitor.environment import recorded_version
from dapo_jax.monitor.records import write_atomically

_CONFIG = "config.json"
_FILE = "recipe.json"
_FOLDER = "functions"

logger = logging.getLogger(__name__)


class Recipe(NamedTuple):
    """The origin of a command's config."""

    recipe: str  # the config file, as the command line names it
    given: Sequence[str]  # dotted keys that the command line sets
    config: Mapping[str, Any] | None  # all options of the file alone, nested; None if it needs one of `given`
    lines: Sequence[str] = ()  # for the user, on what the command changed; not written


def write_recipe(workdir: str | os.PathLike[str], recipe: Recipe | None) -> None:
    """Writes the origin of this start's options; a run that no command has started has none."""
    path = Path(workdir) / _FILE
    if recipe is None:
        path.unlink(missing_ok=True)
    else:
        written = {name: value for name, value in recipe._asdict().items() if name != "lines"}
        path.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


def recorded_recipe(workdir: str | os.PathLike[str]) -> Recipe | None:
    """What the run's last start wrote to `recipe.json`; None if there is none, or if it is damaged."""
    try:
        return Recipe(**json.loads((Path(workdir) / _FILE).read_bytes()))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def write_config(workdir: str | os.PathLike[str], config: dict[str, Any]) -> None:
    """Writes the run's whole config, a nested dict of plain values, to `config.json`."""
    Path(workdir).mkdir(parents=True, exist_ok=True)
    write_atomically(Path(workdir) / _CONFIG, json.dumps(config, indent=2) + "\n")


def recorded_config(workdir: str | os.PathLike[str]) -> dict[str, Any]:
    """The config in `config.json`; {} if there is none. InputError if it is damaged."""
    path = place_of(os.fspath(workdir)) / _CONFIG
    try:
        recorded = json.loads(path.read_bytes())
        if not isinstance(recorded, dict):
            raise InputError("not an object")
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is damaged ({error}): remove it, and the run writes it again") from error
    return recorded


def recorded_options(workdir: str | os.PathLike[str]) -> dict[str, Any]:
    """The options in `config.json` by dotted key; see `recorded_config`."""
    recorded = recorded_config(workdir)
    return flatten(recorded)


def read_config(workdir: str | os.PathLike[str]) -> Config | None:
    """The config in `config.json`, as this version has it; None if there is none.

    Raises:
        InputError: it is damaged, or has options that this version does not know.
    """
    values = recorded_config(workdir)
    return known_config(values, workdir) if values else None


def known_config(values: dict[str, Any], workdir: str | os.PathLike[str]) -> Config:
    """The config of what `config.json` of `workdir` holds. InputError if this version does not know an option of it."""
    if unknown := sorted(flatten(values).keys() - DEFAULTS.keys()):
        raise InputError(
            f"{place_of(os.fspath(workdir)) / _CONFIG} has options that dapo_jax {__version__} does not know: "
            f"{', '.join(unknown)}; it was written by dapo_jax {recorded_version(workdir)}: use that version, or "
            "remove them from the file"
        )
    return from_values(values | {"workdir": os.fspath(workdir)})


def config_differences(workdir: str | os.PathLike[str], options: Mapping[str, Any]) -> list[str]:
    """A line `key: recorded -> given` for each of `options`, by dotted key, whose value differs from `config.json`.

    The list is empty if there is no `config.json`.

    Raises:
        InputError: `config.json` is damaged.
    """
    if not (Path(workdir) / _CONFIG).exists():
        return []
    recorded = recorded_options(workdir)
    given = json.loads(json.dumps(options))  # tuples become lists, as in the file
    shown = [
        {key: repr(values[key]) if key in values else "absent" for key in recorded | given}
        for values in (recorded, given)
    ]
    differing = sorted(key for key in shown[0].keys() - set(FORMER) if shown[0][key] != shown[1][key])
    return [f"{key}: {shown[0][key]} -> {shown[1][key]}" for key in differing]


def keep_files(workdir: str | os.PathLike[str], names: Mapping[str, str], *, done: int) -> None:
    """Copies each FILE.py:function to WORKDIR/functions/OPTION.py, and warns where a resumed run had another file.

    Args:
        names: of functions, by option; those of another form have no file to compare.
        done: training steps that a resumed run has behind it; 0 for a new run.
    """
    for option, name in names.items():
        found = file_and_function(name)
        if found is None or not found[0].is_file():
            continue
        copy, text = Path(workdir) / _FOLDER / f"{option}.py", found[0].read_bytes()
        if done and copy.is_file() and copy.read_bytes() != text:
            before = copy.replace(copy.with_name(f"{option}.until_step_{done}.py"))
            logger.warning(
                "%s=%s: the file has changed since the run stopped, so steps from %d on are computed by another "
                "function; %s is what it was: put it back to resume as if the run had not stopped",
                option,
                name,
                done + 1,
                before,
            )
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(text)
