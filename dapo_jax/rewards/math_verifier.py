r"""Host: symbolic comparison of mathematical answers with the library math-verify."""

import logging
import re
from typing import Any

_BETWEEN_LISTED = re.compile(r"\s*(?:[,;]|[,;]?\s*(?:and|or))\s*")  # two boxes that are one answer
_LAYOUT = re.compile(r"\\q?quad|\\text|\\[()\[\],;:! ]|[${}]")


def score(data_source: str, solution: str, ground_truth: str, extra_info: dict[str, Any]) -> dict[str, Any]:
    r"""1 if the last answer in the solution (LaTeX or plain) is mathematically equal to the ground truth, else 0.

    The last box is the answer; boxes separated only by a comma, a semicolon, "and" or "or" form one answer, a list.
    Without a box, the library finds the answer. As in verl, the ground truth is read as `\boxed{...}`. The library's
    time limits are off, because they need signals in the main thread: the caller bounds time and memory, as the pool
    does.

    No text is executed. LaTeX is parsed by a grammar. Plain expressions reach Python's `eval` through SymPy, but the
    library only passes digits, blanks and `. + - * / ^ ( )`, which cannot form a name.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns about disabled time limits
    latex, plain = LatexExtractionConfig(), ExprExtractionConfig()
    gold = parse(rf"\boxed{{{ground_truth}}}", extraction_config=[latex], parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    if not gold:
        raise ValueError(f"ground_truth={ground_truth!r} must be mathematics in LaTeX: correct the data row")
    answers = parse(_from_last_answer(solution), extraction_config=[plain, latex], parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    correct = verify(gold, answers, timeout_seconds=None)
    return {"score": float(correct), "acc": correct, "pred": str(answers[-1]) if answers else ""}


def _from_last_answer(solution: str) -> str:
    """Only the last box, or a list of boxes as one; the whole solution if it has no box.

    The library would join boxes across up to 70 characters of any text with a comma in it, and prefer "final answer
    is ..." to an earlier box.
    """
    *before, tail = solution.split(r"\boxed")
    end = _end_of_braces(tail)
    if not before or end is None:
        return r"\boxed" + tail if before else solution
    contents = [tail[1 : end - 1]]
    for part in reversed(before[1:]):
        part_end = _end_of_braces(part)
        if part_end is None or not _BETWEEN_LISTED.fullmatch(_LAYOUT.sub(" ", part[part_end:])):
            break
        contents.insert(0, part[1 : part_end - 1])
    return rf"\boxed{{{','.join(contents)}}}"


def _end_of_braces(text: str) -> int | None:
    """Where the `{...}` at the start of `text` ends; None if there is none or it does not close."""
    depth = 0
    for position, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth <= 0:
            return position + 1 if position else None
    return None


def load() -> None:
    """Loads the library, so that loading does not count against the first sample's time limit."""
    score("", r"\boxed{\frac{1}{2}}", "0.5", {})
