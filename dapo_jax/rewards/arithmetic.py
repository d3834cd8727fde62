"""Host: the verifier for arithmetic tasks: the last number in the solution is the answer."""

import re
from collections import deque
from decimal import Decimal, InvalidOperation
from typing import Any

_NUMBER = re.compile(r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?")
_BINARY_MINUS = re.compile(r"(?:[^\W_]|[)\]}%]|[0-9][ \t]+)[-\N{MINUS SIGN}]\Z")


def score(data_source: str, solution: str, ground_truth: str, extra_info: dict[str, Any]) -> dict[str, Any]:
    """1 if the last number in the solution equals the ground truth, else 0. Thousands commas are accepted.

    A minus directly before the digits is a sign (`= -5`), unless it follows an operand (`7-5`, `7 -5`).
    """
    try:
        expected = Decimal(ground_truth.replace(",", ""))
    except InvalidOperation:
        expected = Decimal("nan")
    if not expected.is_finite():
        raise ValueError(f"ground_truth={ground_truth!r} must be a number: correct the data row")
    pred = _last_number(solution)
    correct = pred != "" and Decimal(pred) == expected
    return {"score": float(correct), "acc": correct, "pred": pred}


def _last_number(text: str) -> str:
    last = deque(_NUMBER.finditer(text), maxlen=1)
    if not last:
        return ""
    number = last[0]
    before = text[max(0, number.start() - 100) : number.start()]
    negative = before.endswith(("-", "\N{MINUS SIGN}")) and not _BINARY_MINUS.search(before)
    return "-" * negative + number[0].replace(",", "")
