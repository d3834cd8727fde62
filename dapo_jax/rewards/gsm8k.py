"""Host: the verifiers for GSM8K (Cobbe et al., arXiv:2110.14168): `#### 34`, or the last number."""

import re
from typing import Any

from dapo_jax.rewards.numerals import last_number, whole_number

_WINDOW = 300  # only the last characters of a solution are searched for the answer, as in verl
_MARKED = re.compile(r"#### (-?[0-9.,]+)")


def score(data_source: str, solution: str, ground_truth: str, extra_info: dict[str, Any]) -> dict[str, Any]:
    """1 if the last `#### <number>` is spelled like the ground truth, thousands commas aside; else 0."""
    numbers = _MARKED.findall(solution[-_WINDOW:])
    pred = numbers[-1].replace(",", "") if numbers else ""
    return _result(pred != "" and pred == ground_truth.replace(",", ""), pred)


def score_flexible(data_source: str, solution: str, ground_truth: str, extra_info: dict[str, Any]) -> dict[str, Any]:
    """1 if the last number equals the ground truth, else 0 (numerals.py).

    verl's flexible method compares the spelling, punctuation included, so `It is 34.` is wrong there.
    """
    pred = last_number(solution[-_WINDOW:])
    return _result(pred == whole_number(ground_truth), pred)


def _result(correct: bool, pred: str) -> dict[str, Any]:
    return {"score": float(correct), "acc": correct, "pred": pred}
