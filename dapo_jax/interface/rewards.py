"""Host: Python functions as the reward of a run."""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, SupportsFloat

from dapo_jax.command.tasks import NO_FUNCTIONS
from dapo_jax.config.own_functions import name_of
from dapo_jax.config.sections import RewardConfig
from dapo_jax.errors import InputError
from dapo_jax.rewards.own_function import called_with_four
from dapo_jax.rewards.session import keep
from dapo_jax.rewards.weighted import RESERVED

Function = Callable[..., Any] | str
Weighted = Function | tuple[Function, float]
Reward = Function | Sequence[Weighted] | Mapping[str, Weighted]


def reward_options(reward: Reward) -> dict[str, str]:
    """The options, by dotted key, that make this the reward of a run.

    Args:
        reward: see `dapo_jax.train`.
    """
    if isinstance(reward, str) or callable(reward):
        return {"reward.function": _named("function", reward), "reward.functions": NO_FUNCTIONS}
    if not len(reward):
        raise InputError("reward holds no function: give one, or leave it out")
    for label, (_, weight) in _by_label(reward).items():
        if isinstance(weight, str) or not isinstance(weight, SupportsFloat):
            raise InputError(f"reward, {label!r}: the weight {weight!r} must be a number: give (function, weight)")
    parts = {
        label: {"function": _named(label, function), "weight": float(weight)}
        for label, (function, weight) in _by_label(reward).items()
    }
    return {"reward.function": RewardConfig.function, "reward.functions": json.dumps(parts)}


def _named(label: str, function: Function) -> str:
    """What a config calls the function. InputError if verifier processes cannot have it."""
    if isinstance(function, str):
        return function
    if not callable(function):
        raise InputError(f"reward, {label!r}: {function!r} must be a function, or a verifier's name: correct it")
    called_with_four("reward", function)
    if getattr(function, "__module__", None) != "__main__":
        with suppress(InputError):  # it has no name
            return name_of(function)
    return keep(function, label)


def _by_label(reward: Sequence[Weighted] | Mapping[str, Weighted]) -> dict[str, tuple[Function, float]]:
    """The parts by name: a function's own, or reward_1, reward_2, ... where it has none that can be a metric's."""
    if isinstance(reward, Mapping):
        return {label: _with_weight(part) for label, part in reward.items()}
    parts = [_with_weight(part) for part in reward]
    own = [function if isinstance(function, str) else getattr(function, "__name__", "") for function, _ in parts]
    numbered = (name for number in itertools.count(1) if (name := f"reward_{number}") not in own)
    found: dict[str, tuple[Function, float]] = {}
    for name, part in zip(own, parts, strict=True):
        fits = name.isidentifier() and name not in found and name not in RESERVED
        found[name if fits else next(numbered)] = part
    return found


def _with_weight(part: Weighted) -> tuple[Function, float]:
    return part if isinstance(part, tuple) else (part, 1.0)
