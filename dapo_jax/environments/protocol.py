"""Host: an environment as a user writes it, in the one form in which a worker process plays it.

The text form is a class with `reset(seed, **row)` and `step(text) -> (observation, reward, done[, info])`. The tool
form is a class with `reset` whose other public methods are tools (TRL's `environment_factory`), and maybe `get_reward`,
or else an attribute `reward` from its constructor on.
Functions alone are tools without state. What is `async` is awaited.
"""

import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dapo_jax.data.row_schema import plain
from dapo_jax.environments.tool_formats import calls_in, misfit, schema
from dapo_jax.errors import InputError
from dapo_jax.rewards.messages import EPISODE_NUMBERS, MAX_NUMBER, MAX_NUMBERS
from dapo_jax.rewards.own_function import awaited

TEXT_FORM = "reset(seed, **row) and step(text) -> (observation, reward, done) or (observation, reward, done, info)"
TOOL_FORM = "reset(**row), and public methods as tools"
STEP = "step"
NO_TOOLS = ("reset", "get_reward", "close")
MISTAKES = (ValueError, TypeError, KeyError, ArithmeticError)  # of a tool: the model's, which is told of them
Messages = list[dict[str, str]]


class Fault(Exception):
    """The environment has failed, not the model."""


@dataclass(frozen=True)
class Reply:
    """What an environment says to a turn, or at the start."""

    messages: Messages = field(default_factory=list)  # what the model is shown; [] = nothing
    reward: float | None = None  # None = it gives none
    done: bool = False
    numbers: dict[str, float] = field(default_factory=dict)  # of the info dict: acc and others
    calls: int = 0  # of tools
    invalid: int = 0  # of these, those that were the model's mistakes
    ends: bool = False  # no reply to a turn: what the environment says of an episode that has ended


@dataclass(frozen=True)
class Description:
    """What the trainer has to know of an environment."""

    tools: list[dict[str, Any]] = field(default_factory=list)  # schemas; [] for the text form
    rewards: bool = True  # it gives rewards; False: reward functions do


class Environment:
    """A class in one of the two forms, or tools without state.

    Args:
        given: how the user named it, for messages.
        make: the class; None = `tools` alone.
        arguments: of its constructor.

    Raises:
        InputError: it has none of the forms.
    """

    def __init__(
        self,
        given: str,
        make: Callable[..., Any] | None,
        tools: Sequence[Callable[..., Any]] = (),
        *,
        arguments: Mapping[str, Any],
        tool_format: str,
    ) -> None:
        self.given, self.make, self.arguments, self.tool_format = given, make, arguments, tool_format
        self.functions = {tool.__name__: tool for tool in tools}
        own = [] if make is None else [name for name in dir(make) if not name.startswith("_") and name not in NO_TOOLS]
        self.has_text = make is not None and callable(getattr(make, STEP, None))
        self.methods = [] if self.has_text else [name for name in own if callable(getattr(make, name))]
        self._check_form()
        self.rewards = self.has_text or self._has_reward()
        found = {name: schema(given, function) for name, function in self.functions.items()}
        found |= {name: schema(given, *_method(make, name)) for name in self.methods}
        self.schemas = found

    def _check_form(self) -> None:
        make, given = self.make, self.given
        if make is None:
            return
        if not inspect.isclass(make):
            raise InputError(f"{given} must be a class with {TEXT_FORM}; or with {TOOL_FORM}: give the class")
        if not callable(getattr(make, "reset", None)) or not (self.has_text or self.methods):
            missing = "reset" if not callable(getattr(make, "reset", None)) else "step or a tool"
            raise InputError(f"{given} must have {TEXT_FORM}; or {TOOL_FORM}, but it has no {missing}: add it")
        if self.has_text and self.functions:
            raise InputError(f"{given} has step, and environment.tools go with the tool form alone: leave one out")
        try:
            if self.has_text:
                inspect.signature(getattr(make, STEP)).bind(None, "text")
            inspect.signature(make).bind(**self.arguments)
        except TypeError as error:
            raise InputError(
                f"{given} must take environment.arguments={json.dumps(dict(self.arguments))} in its constructor and "
                f"have {TEXT_FORM}, but {error}: change its parameters"
            ) from error

    def _has_reward(self) -> bool:
        if self.make is None or callable(getattr(self.make, "get_reward", None)):
            return self.make is not None
        instance = self.make(**self.arguments)
        return hasattr(instance, "reward") and not callable(instance.reward)  # a method is a tool

    @property
    def description(self) -> Description:
        return Description(list(self.schemas.values()), self.rewards)


class Episode:
    """One episode of an environment.

    Raises:
        Fault: by all calls: the environment's own mistake.
    """

    def __init__(self, environment: Environment, seed: int, row: Mapping[str, Any]) -> None:
        self.environment = environment
        self.seed, self.row = seed, row
        self.instance: Any = None

    def reset(self) -> Reply:
        """Makes the instance; its first observation."""
        of = self.environment
        if of.make is None:
            return Reply()
        self.instance = of.make(**of.arguments)
        parameters = inspect.signature(self.instance.reset).parameters
        takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        given = {**self.row, "seed": self.seed}
        chosen = {name: value for name, value in given.items() if takes_all or name in parameters}
        return Reply(_messages(of.given, "reset", awaited(self.instance.reset(**chosen)), may_be_none=True))

    def step(self, text: str) -> Reply:
        """The answer to a turn of the policy."""
        return self._step(text) if self.environment.has_text else self._calls(text)

    def finish(self) -> Reply:
        """What `get_reward`, or else `reward`, says of an episode in the tool form that has ended."""
        asked = getattr(self.instance, "get_reward", None)
        name, reward = ("get_reward", awaited(asked())) if callable(asked) else ("reward", self.instance.reward)
        return Reply(reward=_finite(self.environment.given, name, reward), ends=True)

    def _step(self, text: str) -> Reply:
        given, found = self.environment.given, awaited(self.instance.step(text))
        if not isinstance(found, tuple) or len(found) not in (3, 4):
            raise Fault(f"{given}: step must return (observation, reward, done) or with info, not {found!r:.80}")
        observation, reward, done, info = (*found, {})[:4]
        if not isinstance(info, Mapping) or len(info) > MAX_NUMBERS:
            raise Fault(f"{given}: the info of step must be a dict of at most {MAX_NUMBERS} numbers, not {info!r:.80}")
        numbers = {
            str(name): _finite(given, f"info[{name!r}]", value) for name, value in info.items() if _counts(value)
        }
        if taken := sorted(numbers.keys() & {"score", *EPISODE_NUMBERS}):
            raise Fault(f"{given}: the info of step must not have {', '.join(taken)}, which the run says: rename it")
        messages = _messages(given, "step", observation, may_be_none=bool(done))
        return Reply(messages, _finite(given, "the reward of step", reward), bool(done), numbers)

    def _calls(self, text: str) -> Reply:
        """The results of the calls in a turn, in order; one without a call ends the episode."""
        found = [
            self._called(call.name, call.arguments, call.problem)
            for call in calls_in(text, self.environment.tool_format)
        ]
        messages = [{"role": "tool", "name": name, "content": content} for name, content, _ in found]
        return Reply(messages, done=not found, calls=len(found), invalid=sum(wrong for *_, wrong in found))

    def _called(self, name: str, arguments: dict[str, Any], problem: str) -> tuple[str, str, bool]:
        """Name, result as text, and whether the call was a mistake of the model."""
        of = self.environment
        if not problem and name not in of.schemas:
            problem = f"there is no tool {name}, only {', '.join(of.schemas)}"
        problem = problem or misfit(of.schemas[name], arguments)
        if not problem:
            function = of.functions[name] if name in of.functions else getattr(self.instance, name)
            try:
                return name, _as_text(of.given, name, awaited(function(**arguments))), False
            except MISTAKES as error:
                problem = f"{type(error).__name__}: {error}"
        return name, f"Error: {problem}"[:1000], True


def _method(make: Any, name: str) -> tuple[Callable[..., Any], int]:
    """A method of a class, and how many first parameters no call names: self, but for static and class methods."""
    static = isinstance(inspect.getattr_static(make, name), staticmethod | classmethod)
    return getattr(make, name), 0 if static else 1


def _counts(value: Any) -> bool:
    return not isinstance(value, str) and (hasattr(value, "item") or isinstance(value, int | float))


def _messages(given: str, method: str, found: Any, *, may_be_none: bool) -> Messages:
    if found is None and may_be_none:
        return []
    if isinstance(found, str):
        return [{"role": "user", "content": found}]
    if isinstance(found, list) and all(_is_message(one) for one in found):
        return [{"role": one["role"], "content": one["content"]} for one in found]
    raise Fault(
        f"{given}: {method} must return its observation as text or as a list of messages with role and content, "
        f"{'or None, ' * may_be_none}not {found!r:.80}"
    )


def _is_message(one: Any) -> bool:
    return (
        isinstance(one, Mapping)
        and one.get("role") in ("user", "tool", "system")
        and isinstance(one.get("content"), str)
    )


def _finite(given: str, what: str, value: Any) -> float:
    number = value.item() if hasattr(value, "item") and getattr(value, "size", 1) == 1 else value  # a NumPy scalar
    if isinstance(number, int | float) and math.isfinite(number) and abs(number) <= MAX_NUMBER:
        return float(number)
    raise Fault(f"{given}: {what} must be a finite number, not {value!r:.80}")


def _as_text(given: str, tool: str, result: Any) -> str:
    """What a tool returns: text, or a value that JSON has."""
    try:
        if result is not None:
            return result if isinstance(result, str) else json.dumps(result, default=plain, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        pass
    raise Fault(f"{given}: the tool {tool} must return text, or a number or JSON, not {result!r:.80}")
