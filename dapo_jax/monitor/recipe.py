"""Host: where a run's options came from, `recipe.json`: the config file and the keys of the command line."""

import json
import os
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

_FILE = "recipe.json"


class Recipe(NamedTuple):
    """The origin of a command's config."""

    recipe: str  # the config file, as the command line names it
    given: Sequence[str]  # dotted keys that the command line sets
    config: Mapping[str, Any] | None  # all options of the file alone, nested; None if it needs one of `given`


RECIPE: ContextVar[Recipe | None] = ContextVar("RECIPE", default=None)  # of this command's config


def write_recipe(workdir: str | os.PathLike[str]) -> None:
    """Writes the origin of this start's options; a run that no command has started has none."""
    path, found = Path(workdir) / _FILE, RECIPE.get()
    if found is None:
        path.unlink(missing_ok=True)
    else:
        path.write_text(json.dumps(found._asdict(), indent=2) + "\n", encoding="utf-8")


def recorded_recipe(workdir: str | os.PathLike[str]) -> Recipe | None:
    """What the run's last start wrote to `recipe.json`; None if there is none, or if it is damaged."""
    try:
        return Recipe(**json.loads((Path(workdir) / _FILE).read_bytes()))
    except (FileNotFoundError, ValueError, TypeError):
        return None
