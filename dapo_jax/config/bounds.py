"""Host: the values that an option may have, declared with its type in config.py."""

import dataclasses
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

Number = TypeVar("Number")


@dataclass(frozen=True)
class Bound:
    """A rule that a value has to follow."""

    holds: Callable[[Any], bool]
    rule: str  # "... must be {rule}"
    choices: tuple[str, ...] = ()  # of text


def one_of(*choices: str) -> Bound:
    """Text that is one of `choices`."""
    return Bound(lambda value: value in choices, f"one of {', '.join(choices)}", choices)


def above_zero_or_off(meaning: str) -> Bound:
    """A number above 0, or -1, which means `meaning`."""
    return Bound(lambda value: value > 0 or value == -1, f"greater than 0, or -1 ({meaning})")


Positive = Annotated[Number, Bound(lambda value: value > 0, "greater than 0")]
PositiveOrNull = Annotated[Number | None, Bound(lambda value: value is None or value > 0, "greater than 0, or null")]
NotNegative = Annotated[Number, Bound(lambda value: value >= 0, "0 or more")]
ZeroIsNone = Annotated[int, Bound(lambda value: value >= 0, "0 (none) or more")]
Share = Annotated[float, Bound(lambda value: 0 <= value <= 1, "in [0, 1]")]
PositiveShare = Annotated[float, Bound(lambda value: 0 < value <= 1, "in (0, 1]")]
Frequency = Annotated[int, above_zero_or_off("only at the end")]  # every so many steps
AboveOne = Annotated[float, Bound(lambda value: value > 1, "greater than 1")]


def bounds_of(section: type, prefix: str = "") -> Iterator[tuple[str, Bound]]:
    """Each bound of a dataclass and of the dataclasses in it, with the dotted name of its field."""
    for name, kind in typing.get_type_hints(section, include_extras=True).items():
        if dataclasses.is_dataclass(kind):
            yield from bounds_of(typing.cast(type, kind), f"{prefix}{name}.")
        if typing.get_origin(kind) is typing.Literal:
            yield prefix + name, one_of(*typing.get_args(kind))
        for bound in getattr(kind, "__metadata__", ()):
            yield prefix + name, bound
