r"""Host: the verifiers for competition mathematics: an exact copy of verl's behaviour, and a lenient one.

verl (0.9.1) reads the last `Answer: ...` line of the last 300 characters, normalises the answer and the ground truth
as Minerva does (Lewkowycz et al., arXiv:2206.14858, appendix D.1), and compares strings. So `Answer: 34.`,
`Answer: 034` and `**Answer:** 34` are wrong for 34. The lenient verifier accepts these too, by comparing numbers,
and everything that verl accepts.
"""

import re
from typing import Any

from dapo_jax.rewards.numerals import NUMBER, spelled

_WINDOW = 300  # only the last characters of a solution are searched for the answer
_BOX_WINDOW = 100  # and for a box, if there is no `Answer:` line
_INVALID = "[INVALID]"
_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)

_REPLACEMENTS = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    (r"\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (r",\text{and}", ","),
    (r"\text{and}", ","),
    (r"\text{m}", r"\text{}"),
)
_DELETIONS = (
    *r"square ways integers dollars mph inches hours km units \ldots sue points feet minutes digits cents".split(),
    *r"degrees cm gm pounds meters meals edges students childrentickets multiples \text{s} \text{.}".split(),
    "\\text{\ns}",
    *r"\text{}^2 \text{}^3".split(),
    "\\text{\n}",
    *r'\text{} \mathrm{th} ^\circ ^{\circ} \; ,\! {,} " \dots'.split(),
)  # in this order
_REWRITES = (
    (re.compile(r".*?\$(.*?)\$.*"), r"$\1$"),  # keep only the first formula
    (re.compile(r"\\text\{(.*?)\}"), r"\1"),
    (re.compile(r"\\textbf\{(.*?)\}"), r"\1"),
    (re.compile(r"\\overline\{(.*?)\}"), r"\1"),
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),
    (re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"),
    (re.compile(r"sqrt([^{])"), r"sqrt{\1}"),
)

_LENIENT_ANSWER = re.compile(r"answer[\s*_]*:(?:[\s*_$]|\\\[|\\\()*([^\n]+)", re.IGNORECASE)


def score(data_source: str, solution: str, ground_truth: str, extra_info: dict[str, Any]) -> dict[str, Any]:
    """As verl: score +1 or -1, acc, and pred, the normalised answer ("[INVALID]" if there is none)."""
    answers = _ANSWER.findall(solution[-_WINDOW:])
    pred = normalize(answers[-1]) if answers else _INVALID
    if pred != _INVALID:
        return _result(pred == normalize(ground_truth), pred)
    boxed = last_boxed(solution[-_BOX_WINDOW:])
    return _result(boxed == ground_truth, _INVALID if boxed is None else boxed)


def score_lenient(data_source: str, solution: str, ground_truth: str, extra_info: dict[str, Any]) -> dict[str, Any]:
    r"""Like `score`, but also right if the answer is the same number (or text) in another spelling.

    The answer is the content of the last box in the last `Answer:` line, else that line, else the last box;
    all in the last 300 characters. Markdown, `\( \)`, `$`, units that verl drops and a full stop do not matter;
    numbers are compared by value (numerals.py).
    """
    strict = score(data_source, solution, ground_truth, extra_info)
    window = solution[-_WINDOW:]
    lines = _LENIENT_ANSWER.findall(window)
    answer = last_boxed(lines[-1] if lines else window)
    if answer is None and lines:
        answer = lines[-1]
    if strict["acc"] or answer is None:
        return strict
    answer = re.sub(r"\\?\$|\\[()\[\]]", "  ", answer).strip(" \t\r*_`")
    number, expected = _number(answer), _number(ground_truth)
    if number is None and expected is None:
        correct = _without_full_stop(_clean(answer).strip()) == _clean(ground_truth).strip()
    else:
        correct = number == expected
    if correct:
        return _result(True, normalize(ground_truth))
    return _result(False, _without_full_stop(answer) if number is None else number)


def normalize(answer: str) -> str:
    """The spelling in which verl compares answers."""
    answer = _clean(answer)
    digits = answer.replace(",", "")
    return digits if digits.isdigit() else answer.strip()


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}`; None if there is none or its braces do not close."""
    _, box, rest = text.rpartition(r"\boxed{")
    end = end_of_braces("{" + rest) if box else None
    return None if end is None else rest[: end - 2]


def end_of_braces(text: str) -> int | None:
    """Where the `{...}` at the start of `text` ends; None if there is none or it does not close."""
    depth = 0
    for position, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth <= 0:
            return position + 1 if position else None
    return None


def _clean(answer: str) -> str:
    answer = answer.split("=")[-1]
    for old, new in _REPLACEMENTS:
        answer = answer.replace(old, new)
    for expression in _DELETIONS:
        answer = answer.replace(expression, "")
    for pattern, replacement in _REWRITES:
        answer = pattern.sub(replacement, answer)
    return answer.replace("$", "")


def _number(text: str) -> str | None:
    """The number in `text`, ignoring units and markup; None if there is anything else, or more than one number."""
    text = re.split(r"(?<![<>!])=", text)[-1].replace("dots", "\N{HORIZONTAL ELLIPSIS}")
    numbers = list(NUMBER.finditer(text))
    around = NUMBER.sub("@", text)
    if len(numbers) != 1 or "=" in around or _without_full_stop(_clean(around).strip()) != "@":
        return None
    return spelled(numbers[0])


def _without_full_stop(text: str) -> str:
    return text.removesuffix(".").rstrip(" *_`")


def _result(correct: bool, pred: str) -> dict[str, Any]:
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": pred}
