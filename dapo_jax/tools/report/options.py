"""Host: options that a run does not share with its recipe, or runs with each other."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dapo_jax.command.help import described
from dapo_jax.config.sections import Config
from dapo_jax.config.values import DEFAULTS, flatten
from dapo_jax.tools.report.read import RunFiles

_WHERE = ("workdir",)  # says where a run is, not what it does


class Change(NamedTuple):
    key: str
    meaning: str  # the comment of config/sections.py
    values: tuple[str, ...]  # recipe and run, or a value for each run
    given: bool  # on the command line


class Origin(NamedTuple):
    base: str  # what the values are compared with, in words
    recorded: bool  # whether the run says which recipe it began with
    changes: list[Change]


def from_recipe(run: RunFiles) -> Origin:
    """What the run changed of its recipe; of the defaults, if it has not recorded one."""
    recipe = run.recipe
    given = recipe.given if recipe else ()
    if recipe and recipe.config:
        return Origin(recipe.recipe, True, _changes([flatten(dict(recipe.config)), run.config], given))
    base = f"the defaults; {recipe.recipe} needs options of the command line" if recipe else "the defaults"
    return Origin(base, bool(recipe), _changes([DEFAULTS, run.config], given))


def between(runs: Sequence[RunFiles]) -> list[Change]:
    """The options in which the runs differ."""
    return [change for change in _changes([run.config for run in runs], []) if change.key not in _WHERE]


def _changes(configs: Sequence[Mapping[str, Any]], given: Sequence[str]) -> list[Change]:
    shown = [{key: _text(value) for key, value in config.items()} for config in configs]
    keys = dict.fromkeys(key for config in shown for key in config)
    values = {key: tuple(config.get(key, "not recorded") for config in shown) for key in keys}
    meanings = {key: comment for key, _, comment in described(Config())}  # of an earlier version's options: none
    differing = [key for key in sorted(keys) if len(set(values[key])) > 1]
    return [Change(key, meanings.get(key, ""), values[key], key in given) for key in differing]


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value)) or "none"
    return "null" if value is None else str(value) or "empty"
