"""Host: the verifier for arithmetic tasks: the last number in the solution is the answer."""

from typing import Any

from dapo_jax.rewards.numerals import last_number, whole_number


def score(data_source: str, solution: str, ground_truth: str, extra_info: dict[str, Any]) -> dict[str, Any]:
    """1 if the last number in the solution equals the ground truth, else 0 (numerals.py)."""
    expected = whole_number(ground_truth)
    if expected is None:
        raise ValueError(f"ground_truth={ground_truth!r} must be a number: correct the data row")
    pred = last_number(solution)
    return {"score": float(pred == expected), "acc": pred == expected, "pred": pred}
