"""Host: Python classes and functions as the environment and the tools of a run."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from dapo_jax.config.own_functions import name_of
from dapo_jax.config.sections import Config, EnvironmentConfig
from dapo_jax.config.values import with_values
from dapo_jax.errors import InputError
from dapo_jax.rewards.session import keep

Environment = type | str
Tool = Callable[..., Any] | str


def with_environment(config: Config, environment: Environment | None, tools: Sequence[Tool] | None) -> Config:
    """`config` with this environment and these tools; what is None is as there.

    Args:
        environment, tools: see `dapo_jax.train`.
    """
    values: dict[str, Any] = {}
    if environment is not None:
        values["environment.path"] = _named("environment", environment)
        if tools is None and config.environment.path != values["environment.path"]:
            values["environment.tools"] = EnvironmentConfig.tools
    if tools is not None:
        if isinstance(tools, str) or callable(tools):
            raise InputError(f"tools must be a list of functions, not {tools!r:.80}: put it in a list")
        values["environment.tools"] = tuple(_named("tools", tool) for tool in tools)
    return with_values(config, values) if values else config


def _named(option: str, given: Any) -> str:
    """What a config calls a class or a function. InputError if environment processes cannot have it."""
    if isinstance(given, str):
        return given
    if not callable(given):
        raise InputError(
            f"{option} has {given!r:.80}, which must be a class or a function, or the name of one: correct it"
        )
    if getattr(given, "__module__", None) != "__main__":
        with suppress(InputError):  # it has no name
            return name_of(given)
    return keep(given, getattr(given, "__name__", option), option)
