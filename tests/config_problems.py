"""What validation says of a config that differs from a valid one."""

import re
from typing import Any

from dapo_jax.command.validation import validate
from dapo_jax.config.sections import Config
from dapo_jax.config.values import default_config, freeze


def config_with(changes: dict[str, Any]) -> Config:
    """A valid config with `changes`."""
    values = default_config()
    with values.unlocked():
        values.update_from_flattened_dict({"model.path": "random", "data.task": "arithmetic", **changes})
    return freeze(values)


def problems(changes: dict[str, Any]) -> list[str]:
    """What `validate` says, one line a problem."""
    try:
        validate(config_with(changes))
    except ValueError as error:
        first, *lines = str(error).split("\n")
        assert first == "the config has problems:"
        return [line.removeprefix("  - ") for line in lines]
    return []


def assert_one(found: list[str], message: str) -> None:
    assert len(found) == 1 and re.search(message, found[0]), (message, found)
