"""Host: the verifiers for GSM8K (Cobbe et al., arXiv:2110.14168): `#### 34`, or the last number."""

import re
from typing import Any

_WINDOW = 300  # only the last characters of a solution are searched for the answer, as in verl
_MARKED = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[0-9.,]*[0-9][0-9.,]*")


def score(data_source: str, solution: str, ground_truth: str, extra_info: dict[str, Any]) -> dict[str, Any]:
    """1 if the last `#### <number>` is spelled like the ground truth, thousands commas aside; else 0."""
    return _compare(_MARKED.findall(solution[-_WINDOW:]), ground_truth)


def score_flexible(data_source: str, solution: str, ground_truth: str, extra_info: dict[str, Any]) -> dict[str, Any]:
    """1 if the last number is spelled like the ground truth, thousands commas and a full stop aside; else 0.

    verl's flexible method reads the same number but keeps its punctuation, so `It is 34.` is wrong there.
    """
    return _compare([text.rstrip(".,") for text in _NUMBER.findall(solution[-_WINDOW:])], ground_truth)


def _compare(numbers: list[str], ground_truth: str) -> dict[str, Any]:
    pred = numbers[-1].replace(",", "") if numbers else ""
    correct = pred != "" and pred == ground_truth.replace(",", "")
    return {"score": float(correct), "acc": correct, "pred": pred}
