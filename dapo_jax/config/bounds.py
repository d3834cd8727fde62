"""Host: the values that an option may have, declared with its type in sections.py."""

import dataclasses
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from dapo_jax.config.own_functions import is_own

Number = TypeVar("Number")


@dataclass(frozen=True)
class Bound:
    """A rule for one value."""

    holds: Callable[[Any], bool]
    rule: str  # "... must be {rule}"
    choices: tuple[str, ...] = ()  # of text

    def problems(self, key: str, value: Any) -> list[str]:
        """One line if `value` breaks the rule, else none."""
        return [] if self.holds(value) else [f"{key}={value!r} must be {self.rule}"]


def one_of(*choices: str, or_own: bool = False) -> Bound:
    """Text that is one of `choices`, or with `or_own` the path of a function of your own."""
    rule = f"one of {', '.join(choices)}{', or FILE.py:function' * or_own}"
    return Bound(lambda value: value in choices or (or_own and is_own(value)), rule, choices)


def at_most(limit: float) -> Bound:
    """A number up to `limit`."""
    return Bound(lambda value: value <= limit, f"at most {limit}")


def above_zero_or_off(meaning: str) -> Bound:
    """A number above 0, or -1, which means `meaning`."""
    return Bound(lambda value: value > 0 or value == -1, f"greater than 0, or -1 ({meaning})")


def zero_or_more(meaning: str) -> Bound:
    """A number above 0, or 0, which means `meaning`."""
    return Bound(lambda value: value >= 0, f"0 ({meaning}) or more")


Positive = Annotated[Number, Bound(lambda value: value > 0, "greater than 0")]
PositiveOrNull = Annotated[Number | None, Bound(lambda value: value is None or value > 0, "greater than 0, or null")]
NotNegative = Annotated[Number, Bound(lambda value: value >= 0, "0 or more")]
ZeroIsNone = Annotated[int, zero_or_more("none")]
Share = Annotated[float, Bound(lambda value: 0 <= value <= 1, "in [0, 1]")]
PositiveShare = Annotated[float, Bound(lambda value: 0 < value <= 1, "in (0, 1]")]
AboveOne = Annotated[float, Bound(lambda value: value > 1, "greater than 1")]
Frequency = Annotated[int, above_zero_or_off("only at the end")]  # every so many steps
Steps = Annotated[int, above_zero_or_off("as many as trainer.total_epochs says")]
Axis = Annotated[int, above_zero_or_off("what the other axes leave")]
ProcessId = Annotated[int, Bound(lambda value: value >= -1, "0 or more, or -1 (JAX finds it)")]
ExitCode = Annotated[int, Bound(lambda value: 0 <= value <= 255, "in 0..255")]
ZeroOrOne = Annotated[int, Bound(lambda value: value in (0, 1), "0 or 1")]
EvenPositive = Annotated[Positive[int], Bound(lambda value: value % 2 == 0, "even, for rotary embeddings")]
Betas = Annotated[
    tuple[float, float], Bound(lambda value: all(0 <= beta < 1 for beta in value), "two numbers in [0, 1)")
]
Temperature = Annotated[float, zero_or_more("greedy")]
PositiveTemperature = Annotated[float, Bound(lambda value: value > 0, "greater than 0: equal samples give no gradient")]
TopP = Annotated[float, Bound(lambda value: 0 < value <= 1, "in (0, 1]; 1 switches it off")]
TopK = Annotated[int, above_zero_or_off("off")]
LowerClip = Annotated[float, Bound(lambda value: 0 < value <= 1, "in (0, 1]; 1 never clips")]


def bounds_of(section: type, prefix: str = "") -> Iterator[tuple[str, Bound]]:
    """Each bound of a dataclass and of the dataclasses in it, with the dotted name of its field."""
    for name, kind in typing.get_type_hints(section, include_extras=True).items():
        if dataclasses.is_dataclass(kind):
            yield from bounds_of(typing.cast(type, kind), f"{prefix}{name}.")
        if typing.get_origin(kind) is typing.Literal:
            yield prefix + name, one_of(*typing.get_args(kind))
        for bound in getattr(kind, "__metadata__", ()):
            yield prefix + name, bound
