r"""Host: numbers in a text, read alike by all verifiers that compare numbers; those of arithmetic and of GSM8K.

    -5  +5  -5 with any minus sign   1,234  1 234  1{,}234  1\,234 (groups of three, one separator)   .5   1.5e3
    10^5   10^{-2}   3 \times 10^8

A number is spelled without separators, leading zeros and trailing zero decimals: equal numbers are equal texts.
"""

import re
from collections import deque
from decimal import Decimal
from typing import Any

MINUS = "\u2212\u2013\u2010\u2011\u2012\ufe63\uff0d-"  # minus sign, dashes, hyphens
SPACE = r"(?:,\\!|\{,\}|\\[,;: ]|[ ~\u00a0\u2009\u202f])"  # between groups of digits, where there is no comma
_EXPONENT = r"\s*\^\s*(?:\{{\s*(?P<{0}>[{1}]?\d{{1,4}})\s*\}}|(?P<{0}_bare>[{1}]?\d{{1,4}})(?!\d))"
NUMBER = re.compile(
    rf"(?P<sign>[+{MINUS}])?(?P<digits>"
    rf"[1-9]\d{{0,2}}(?P<separator>,|{SPACE})\d{{3}}(?:(?P=separator)\d{{3}})*(?!\d)(?:\.\d+)?"
    rf"|\d+(?:\.\d+)?|(?<![\w.)\]}}])\.\d+)"
    rf"(?:[eE](?P<e>[+{MINUS}]?\d{{1,4}})(?!\w)|\s*(?:\\times|\\cdot|[×·*])\s*10{_EXPONENT.format('ten', MINUS)}"
    rf"|{_EXPONENT.format('power', MINUS)})?",
    re.ASCII,
)
_OPERAND = re.compile(r"(?:[^\W_]|[)\]}%]|[0-9][ \t]+)\Z")  # what a minus after it is subtracted from
_UNREAD = re.compile(r"\s*\^(?!\s*\{?\s*\\circ)|[\u00b2\u00b3\u00b9\u2070-\u207e]")  # a power after a number
_MOST_DIGITS = 1000  # of a power
_WINDOW = 300  # only the last characters of a solution to GSM8K are searched for the answer, as in verl
_MARKED = re.compile(r"#### (-?[0-9.,]+)")


def arithmetic(data_source: str, solution: str, ground_truth: str, extra_info: dict[str, Any]) -> dict[str, Any]:
    """1 if the last number in the solution equals the ground truth, else 0."""
    expected = whole_number(ground_truth)
    if expected is None:
        raise ValueError(f"ground_truth={ground_truth!r} must be a number: correct the data row")
    return _compared(last_number(solution), expected)


def gsm8k(data_source: str, solution: str, ground_truth: str, extra_info: dict[str, Any]) -> dict[str, Any]:
    """1 if the last `#### <number>` is spelled like the ground truth, thousands commas aside; else 0.

    GSM8K: Cobbe et al., arXiv:2110.14168.
    """
    numbers = _MARKED.findall(solution[-_WINDOW:])
    return _compared(numbers[-1].replace(",", "") if numbers else "", ground_truth.replace(",", ""))


def gsm8k_flexible(data_source: str, solution: str, ground_truth: str, extra_info: dict[str, Any]) -> dict[str, Any]:
    """1 if the last number equals the ground truth, else 0.

    verl's flexible method compares the spelling, punctuation included, so `It is 34.` is wrong there.
    """
    return _compared(last_number(solution[-_WINDOW:]), whole_number(ground_truth))


def _compared(pred: str, expected: str | None) -> dict[str, Any]:
    correct = pred != "" and pred == expected
    return {"score": float(correct), "acc": correct, "pred": pred}


def last_number(text: str) -> str:
    """The last number in a text; "" if there is none, or only as a part of a power that is not read, such as x^5.

    A minus directly before the digits is a sign (`= -5`), unless it follows an operand (`7-5`, `7 -5`).
    """
    for last in deque(NUMBER.finditer(text), maxlen=1):
        before = text[max(0, last.start() - 100) : last.start()]
        if not before.rstrip(" {").endswith("^") and not _UNREAD.match(text, last.end()):
            return spelled(last, signed=not _OPERAND.search(before)) or ""
    return ""


def whole_number(text: str) -> str | None:
    """The number that is all of a text, but for white space; None if the text is anything else."""
    found = NUMBER.fullmatch(text.strip())
    return found and spelled(found)


def spelled(found: re.Match[str], *, signed: bool = True) -> str | None:
    """A match of NUMBER as text, without its sign unless `signed`; None for a power of too many digits."""
    part = {name.removesuffix("_bare"): text for name, text in found.groupdict().items() if text}
    part["ten"] = part.get("ten", part.get("e", ""))
    digits = part["digits"].replace(part.get("separator", ","), "")
    ten, power = (re.sub(f"[{MINUS}]", "-", part.get(name, "")) for name in ("ten", "power"))
    if power:
        exponent, of_ten = int(power), digits.rstrip("0") == "1"
        if len(digits) * abs(exponent) > _MOST_DIGITS or not (of_ten or (digits.isdecimal() and exponent >= 0)):
            return None
        ten = str(exponent * (len(digits) - 1)) if of_ten else ""
        digits = "1" if of_ten else str(int(digits) ** exponent)
    whole, point, decimals = f"{Decimal(f'{digits}e{ten or 0}'):f}".partition(".")
    text = ((whole.lstrip("0") or "0") + point + decimals.rstrip("0")).rstrip(".")
    return f"-{text}" if signed and part.get("sign", "+") != "+" and text != "0" else text
