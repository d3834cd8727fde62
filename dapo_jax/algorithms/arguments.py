"""Host: passes to the paper's functions what their parameters name."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any


def needs(function: Callable[..., Any], name: str) -> bool:
    """Whether `function` has a parameter of this name."""
    return name in inspect.signature(function).parameters


def required(function: Callable[..., Any]) -> set[str]:
    """The parameters without a default."""
    parameters = inspect.signature(function).parameters
    named = {name: one for name, one in parameters.items() if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)}
    return {name for name, one in named.items() if one.default is one.empty}


def chosen(function: Callable[..., Any], available: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `available` that `function` has a parameter for."""
    return {name: value for name, value in available.items() if needs(function, name)}
