"""Host: what a verifier returns, as named numbers and the answer that it read."""

import math
import numbers
import reprlib
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from dapo_jax.rewards.messages import MAX_NUMBER, MAX_NUMBERS, MAX_TEXT, WRONG_RESULT


def normalize_result(result: Any) -> tuple[dict[str, float], str | None]:
    """A verifier's result as named floats (with "score" and "acc", finite in float32) and pred.

    A bare number is both score and acc. In a dict acc defaults to the score; text other than pred is dropped.
    ValueError for any other result.
    """
    bare = not isinstance(result, Mapping)
    if bare:
        result = {"score": result}
    if len(result) > MAX_NUMBERS:
        raise ValueError(f"{WRONG_RESULT} at most {MAX_NUMBERS} numbers, not {len(result)}")
    values = {
        short(_text(name)): _finite("" if bare else f"{_described(name)}: ", value)
        for name, value in result.items()
        if name != "pred" and (name in ("score", "acc") or not isinstance(value, str))
    }
    if "score" not in values:
        raise ValueError(f"{WRONG_RESULT} a number or a dict with 'score', not {_described(result)}")
    values.setdefault("acc", values["score"])
    pred = result.get("pred")
    return values, None if pred is None else short(_text(pred))


def _finite(name: str, value: Any) -> float:
    kind = "a finite number"
    with suppress(TypeError, ValueError, OverflowError):
        number = value.item() if hasattr(value, "item") else value  # a NumPy scalar
        if isinstance(number, numbers.Real) and math.isfinite(number):
            if abs(float(number)) <= MAX_NUMBER:
                return float(number)
            kind = "a number that is finite in float32"
    raise ValueError(f"{WRONG_RESULT} {kind}, not {name}{_described(value)}")


def _described(value: Any) -> str:
    try:
        return reprlib.repr(value)
    except Exception:  # an integer with too many digits, or a broken __repr__
        return f"a {type(value).__name__}"


def _text(value: Any) -> str:
    try:
        return str(value)
    except Exception:
        return _described(value)


def short(text: str) -> str:
    """The beginning of a text that fits into a worker's answer."""
    return text[:MAX_TEXT].encode("utf-8", "replace").decode()
