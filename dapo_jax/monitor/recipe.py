"""Host: where a run's options came from: `recipe.json`, with the config file and the keys of the command line; and
copies in `functions/` of the files of your own functions, with what has changed in them since.
"""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dapo_jax.config.own_functions import file_and_function

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
