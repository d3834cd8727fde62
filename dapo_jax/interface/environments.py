"""Host: Python classes and functions as the environment and the tools of a run."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from dapo_jax.config.own_functions import name_of
from dapo_jax.config.sections import Config, EnvironmentConfig
from dapo_jax.config.values import with_values
from dapo_jax.data.rows import PromptRow
from dapo_jax.environments.episodes import TRUTHS
from dapo_jax.errors import InputError
from dapo_jax.interface.samples import Prompt
from dapo_jax.rewards.session import keep

Environment = type | str | Mapping[str, type | str]
Tool = Callable[..., Any] | str


def with_environment(config: Config, environment: Environment | None, tools: Sequence[Tool] | None) -> Config:
    """`config` with this environment and these tools; what is None is as there.

    Args:
        environment, tools: see `dapo_jax.train`.
    """
    values: dict[str, Any] = {}
    if environment is not None:
        values["environment.path"] = (
            json.dumps({name: _named("environment", one, name) for name, one in environment.items()})
            if isinstance(environment, Mapping)
            else _named("environment", environment)
        )
        if tools is None and config.environment.path != values["environment.path"]:
            values["environment.tools"] = EnvironmentConfig.tools
    if tools is not None:
        if isinstance(tools, str) or callable(tools):
            raise InputError(f"tools must be a list of functions, not {tools!r:.80}: put it in a list")
        values["environment.tools"] = tuple(_named("tools", tool) for tool in tools)
    return with_values(config, values) if values else config


def listed(prompts: Any) -> list[Prompt]:
    """Prompts as a list. InputError if there are none, or if one is neither text nor a list of messages."""
    found = [] if isinstance(prompts, str | Mapping) or not isinstance(prompts, Collection) else list(prompts)
    chats = [prompt if isinstance(prompt, Collection) else () for prompt in found if not isinstance(prompt, str)]
    if not found or not all(len(chat) and all(isinstance(part, Mapping) for part in chat) for chat in chats):
        raise InputError("prompts must be a list of texts, or of lists of chat messages, and not empty: correct it")
    return found


def beginnings(prompts: Sequence[Prompt], rows: Sequence[Mapping[str, Any]] | None, *, plays: bool) -> list[PromptRow]:
    """Prompts as the rows of a file, with these further columns.

    Args:
        plays: whether an environment is there to read the columns.
    """
    given = list(rows) if isinstance(rows, Collection) else []
    dicts = sum(isinstance(row, Mapping) for row in given)
    if rows is not None and not (plays and dicts == len(given) == len(prompts)):
        raise InputError(
            f"rows has {dicts} dicts of columns, which must be one for each of {len(prompts)} prompts and go with "
            "an environment: correct it, or leave it out"
        )
    return [
        PromptRow(
            prompt if isinstance(prompt, str) else tuple(prompt),
            str(columns.get("data_source", "")),
            next((columns[name] for name in TRUTHS if name in columns), None),
            dict(columns),
            f"prompt {number}",
        )
        for number, (prompt, columns) in enumerate(zip(prompts, rows or [{}] * len(prompts), strict=True))
    ]


def _named(option: str, given: Any, label: str = "") -> str:
    """What a config calls a class or a function, which is `label` if it has no name that finds it.

    InputError if environment processes cannot have it.
    """
    if isinstance(given, str):
        return given
    if not callable(given):
        raise InputError(
            f"{option} has {given!r:.80}, which must be a class or a function, or the name of one: correct it"
        )
    if getattr(given, "__module__", None) != "__main__":
        with suppress(InputError):  # it has no name
            return name_of(given)
    return keep(given, label or getattr(given, "__name__", option), option)
