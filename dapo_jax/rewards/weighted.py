"""Host: the weighted sum of several verifiers' scores, described by the text of `reward.functions`, a JSON object:

{"correct": "math_dapo", "format": {"function": "FILE.py:format_score", "weight": 0.2}}
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dapo_jax.errors import InputError
from dapo_jax.rewards.messages import MAX_NUMBERS, normalize_result

EXAMPLE = '{"correct": "math_dapo", "format": {"function": "FILE.py:format_score", "weight": 0.2}}'
MAX_PARTS = MAX_NUMBERS // 2  # a verdict also has their sum, acc and further numbers of the functions
RESERVED = ("score", "acc", "pred")
JUDGE = "judge"  # the verifier that the trainer's process asks over HTTP (judge.py)


@dataclass(frozen=True)
class Part:
    """One of the functions."""

    name: str  # of its score among the numbers of a verdict
    function: str  # of `verifiers.load_verifier`
    weight: float


def is_weighted(function: str) -> bool:
    """Whether the name of a verifier is the text of several."""
    return function.lstrip().startswith("{")


def functions_of(function: str) -> tuple[str, ...]:
    """The functions behind the name of a verifier: itself, or its parts. The first one's acc counts."""
    return tuple(part.function for part in parse_parts(function)) if is_weighted(function) else (function,)


def has_judge(function: str) -> bool:
    """Whether the verifier, or a part of it, is the judge."""
    return JUDGE in functions_of(function)


def without_judge(function: str) -> str:
    """The text of a verifier's other parts; "" if there are none, the name itself if it has no judge."""
    if not has_judge(function):
        return function
    others = [part for part in parse_parts(function) if part.function != JUDGE] if is_weighted(function) else []
    parts = {part.name: {"function": part.function, "weight": part.weight} for part in others}
    return json.dumps(parts) if parts else ""


def described(function: str) -> str:
    """The option that names a verifier, for messages."""
    return f"reward.functions={function}" if is_weighted(function) else f"reward.function={function!r}"


def parse_parts(text: str) -> tuple[Part, ...]:
    """The parts that the text of `reward.functions` describes. InputError with what is wrong, and the rule."""
    rule = f"reward.functions={text[:200]} must be a JSON object such as {EXAMPLE}"
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{rule} ({error}): correct it") from error
    if not isinstance(given, dict) or not given or len(given) > MAX_PARTS:
        raise InputError(f"{rule}, with 1 to {MAX_PARTS} functions by name: correct it")
    return tuple(_parse(name, value) for name, value in given.items())


def _parse(name: str, value: Any) -> Part:
    where = f"reward.functions, {name!r}"
    if not name.isidentifier() or name in RESERVED:
        raise InputError(
            f"{where} is the name of a metric: it must have only letters, digits and _, not begin with a digit, and "
            f"not be {' or '.join(RESERVED)}: rename it"
        )
    value = {"function": value} if isinstance(value, str) else value
    if not isinstance(value, dict) or not {"function"} <= value.keys() <= {"function", "weight"}:
        raise InputError(f"{where} must be a function's name, or an object of 'function' and 'weight': correct it")
    function, weight = value["function"], value.get("weight", 1.0)
    if not isinstance(function, str) or function == "none" or is_weighted(function):
        raise InputError(
            f"{where}: function={function!r} must be the name of a verifier, or a function of yours as FILE.py:NAME: "
            "correct it, or leave it out"
        )
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise InputError(f"{where}: weight={weight!r} must be a finite number: correct it")
    return Part(name, function, float(weight))


def weighted(parts: Sequence[Part], verifiers: Sequence[Callable[..., Any]]) -> Callable[..., dict[str, Any] | None]:
    """A verifier whose score is the sum of weight x score over the parts; acc and pred are the first part's.

    Each part's score is also returned under its name, and its other numbers as NAME.number. If a part fails, the sum
    does; if one returns None, for no verdict, the sum is None.

    Args:
        verifiers: the function of each part.
    """

    def score(*arguments: Any) -> dict[str, Any] | None:
        found: dict[str, Any] = {}
        total = 0.0
        for part, verifier in zip(parts, verifiers, strict=True):
            try:
                result = verifier(*arguments)
                if result is None:
                    return None
                numbers, pred = normalize_result(result)
            except Exception as error:
                error.add_note(f"({part.name!r} of reward.functions)")
                raise
            if part is parts[0]:
                found |= {"acc": numbers["acc"], "pred": pred}
            total += part.weight * numbers["score"]
            found[part.name] = numbers["score"]
            found |= {f"{part.name}.{name}": number for name, number in numbers.items() if name not in RESERVED}
        return {"score": total, **found}

    return score
