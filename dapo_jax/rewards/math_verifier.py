r"""Host: symbolic comparison of mathematical answers with the library math-verify."""

import logging
from typing import Any


def score(data_source: str, solution: str, ground_truth: str, extra_info: dict[str, Any]) -> dict[str, Any]:
    r"""1 if the last answer in the solution (LaTeX or plain) equals the ground truth as mathematics, else 0.

    As verl, the ground truth is read as `\boxed{...}`. The library's own time limits are off, because they
    need the main thread's signals: whoever calls this bounds its time and memory, as the pool does.

    No text is executed: LaTeX is read by a grammar. Plain expressions reach Python's `eval` through SymPy, but the
    library lets only digits, blanks and `. + - * / ^ ( )` through, of which no name can be made.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off
    latex, plain = LatexExtractionConfig(), ExprExtractionConfig()
    gold = parse(rf"\boxed{{{ground_truth}}}", extraction_config=[latex], parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    if not gold:
        raise ValueError(f"ground_truth={ground_truth!r} must be mathematics in LaTeX: correct the data row")
    answers = parse(solution, extraction_config=[plain, latex], parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    correct = verify(gold, answers, timeout_seconds=None)
    return {"score": float(correct), "acc": correct, "pred": str(answers[-1]) if answers else ""}


def load() -> None:
    """Loads the library: its seconds must not count against the time limit of a first sample."""
    score("", r"\boxed{\frac{1}{2}}", "0.5", {})
