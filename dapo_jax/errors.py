"""Host: the error for wrong input, what its message may suggest, and text that is safe to print."""

import difflib
import re
import sys
from collections.abc import Iterable
from typing import TextIO

# Control characters but for the line's end and the tab, marks of direction, line separators, lone surrogates.
_UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class InputError(ValueError):
    """The user's input is wrong. A command ends with exit code 2 and this message: name, value, rule, fix.

    Any other ValueError is a bug, or a failure that JAX reports that way.
    """


def printable(text: str) -> str:
    """`text` with what a terminal obeys, or cannot show, as escapes: \\x1b for the character that begins a colour."""
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def say(text: object, file: TextIO | None = None) -> None:
    """Prints a text on stdout or `file` as `printable`: names, paths and errors in it may come from outside."""
    print(printable(str(text)), file=file or sys.stdout, flush=True)


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """A question that names those of `known` that are close to `given`; "" if there are none."""
    close = difflib.get_close_matches(given, list(known))
    return f"did you mean {' or '.join(close)}?" if close else ""


def divisors(number: int) -> list[int]:
    """All divisors of a positive number, in ascending order; only 1 from a million on."""
    return [one for one in range(1, number + 1) if number % one == 0] if number < 10**6 else [1]


def nearest(numbers: Iterable[int], wanted: int) -> str:
    """The numbers closest to `wanted`, at most three, as in "8, 12 or 24"; "" if there are none."""
    chosen = sorted(sorted(set(numbers), key=lambda one: (abs(one - wanted), one))[:3])
    if not chosen:
        return ""
    *first, last = map(str, chosen)
    return f"{', '.join(first)} or {last}" if first else last
