"""Host: Python functions as the reward of a run."""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dapo_jax.config.sections import Config, RewardConfig
from dapo_jax.config.values import with_values
from dapo_jax.errors import InputError
from dapo_jax.places import copy_of, is_address
from dapo_jax.problems import NO_FUNCTIONS
from dapo_jax.rewards.own_source import reward_name
from dapo_jax.rewards.verifiers import OF_SESSION
from dapo_jax.rewards.weighted import RESERVED
from dapo_jax.run import Own

Function = Callable[..., Any] | str
Weighted = Function | tuple[Function, float]
Reward = Function | Sequence[Weighted] | Mapping[str, Weighted]


def with_reward(config: Config, reward: Reward) -> tuple[Config, Own]:
    """`config` with this reward, and the functions of it that run in this process, for `training.train`.

    Args:
        reward: see `dapo_jax.train`.
    """
    folder = copy_of(config.workdir, "rewards") if is_address(config.workdir) else config.workdir
    own: dict[str, Callable[..., Any]] = {}

    def named(label: str, function: Function) -> str:
        """What a config calls the function; one that no other process can load is put into `own`."""
        if isinstance(function, str):
            return function
        if not callable(function):
            raise InputError(f"reward, {label!r}: {function!r} must be a function, or a verifier's name: correct it")
        name = reward_name(function, folder, label)
        if name is None:
            own[label] = function
        return name or OF_SESSION + label

    if isinstance(reward, str) or callable(reward):
        values = {"reward.function": named("function", reward), "reward.functions": NO_FUNCTIONS}
        return with_values(config, values), own
    if not len(reward):
        raise InputError("reward holds no function: give one, or leave it out")
    parts = {
        label: {"function": named(label, function), "weight": float(weight)}
        for label, (function, weight) in _by_label(reward).items()
    }
    values = {"reward.function": RewardConfig.function, "reward.functions": json.dumps(parts)}
    return with_values(config, values), own


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
