"""Host: configs for programs: recipes by name, files, and changes by dotted key."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from dapo_jax.command.option_uses import without_switched_off
from dapo_jax.config.aliases import FROM_MEMORY, former_options
from dapo_jax.config.files import read_config_file
from dapo_jax.config.sections import Config
from dapo_jax.config.values import DEFAULTS, default_config, flat, freeze
from dapo_jax.errors import InputError, did_you_mean, say

AnyConfig = Config | ConfigDict | str | Path


def load_config(name: str | Path, changes: Mapping[str, Any] | None = None) -> ConfigDict:
    """The options of a recipe or a file, to change and to pass to `train` or `Policy`.

        config = dx.load_config("quickstart", {"rollout.n": 4, "workdir": "runs/mine"})
        config.actor.optim.lr = 1e-5

    Options of the recipe that the changes switch off get their defaults, as on the command line.

    Args:
        name: a recipe, as `recipes` lists them, or a Python, JSON or YAML file.
        changes: values by dotted key.

    Raises:
        InputError: there is no such file, or it fails; an unknown key, or a value of the wrong type.
    """
    return _changed(f"load_config({str(name)!r})", read_config_file(str(name)), changes or {})


def _changed(caller: str, config: ConfigDict, changes: Mapping[str, Any]) -> ConfigDict:
    for key in changes.keys() - DEFAULTS.keys():
        remembered = key in FROM_MEMORY and f"write {FROM_MEMORY[key].format(changes[key])}"
        cure = remembered or did_you_mean(key, DEFAULTS) or "keys are dotted, such as rollout.n"
        raise InputError(f"{caller}: there is no option {key}: {cure}")
    base = freeze(config)
    try:
        config.update_from_flattened_dict(dict(changes))
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        raise InputError(f"{caller}: {error}: correct the changes") from error
    varied = freeze(config)
    used = flat(without_switched_off(base, varied, changes))
    config.update_from_flattened_dict({key: used[key] for key, value in flat(varied).items() if used[key] != value})
    return config


def with_changes(config: AnyConfig, changes: Mapping[str, Any]) -> Config:
    """The frozen form of a config in any form, with changes as for `load_config`."""
    frozen = as_config(config)
    if not changes:
        return frozen
    values = default_config()
    values.update_from_flattened_dict(flat(frozen))
    return as_config(_changed("train", values, changes))


def as_config(config: AnyConfig) -> Config:
    """The frozen form of a config in any form; a text or path is loaded first. Says which options have no effect."""
    if isinstance(config, Config):
        return config
    values = load_config(config) if isinstance(config, str | Path) else config
    for line in former_options(values):
        say(f"dapo_jax: {line}", file=sys.stderr)
    return freeze(values)
