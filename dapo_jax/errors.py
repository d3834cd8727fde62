"""Host: the error for wrong input."""

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """The user's input is wrong. A command ends with exit code 2 and this message: name, value, rule, fix.

    Any other ValueError is a bug, or a failure that JAX reports that way.
    """


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """A question that names those of `known` that are close to `given`; "" if there are none."""
    close = difflib.get_close_matches(given, list(known))
    return f"did you mean {' or '.join(close)}?" if close else ""
