import logging

import pytest

from dapo_jax.rewards import math_verifier


@pytest.mark.parametrize(
    ("solution", "ground_truth", "correct"),
    [
        (r"so \boxed{0.25}", r"\frac{1}{4}", True),
        (r"so $\frac{2}{8}$", r"\frac14", True),
        ("The answer is 34.", "34", True),
        (r"so \boxed{\{2, 1\}}", r"\{1,2\}", True),
        (r"so \boxed{x+1}", "1+x", True),
        (r"so \boxed{(2, 1)}", "(1,2)", False),
        (r"so \boxed{35}", "34", False),
        ("no answer", "34", False),
        ("", "34", False),
        ("\\boxed{" * 1000, "34", False),
        ("\0\ud800" * 1000, "34", False),
    ],
)
def test_answers_are_compared_as_mathematics(solution, ground_truth, correct):
    result = math_verifier.score("", solution, ground_truth, {})
    assert (result["score"], result["acc"]) == (float(correct), correct)
    assert isinstance(result["pred"], str)


def test_a_ground_truth_that_is_not_mathematics_is_an_error():
    with pytest.raises(ValueError, match="ground_truth='' must be mathematics"):
        math_verifier.score("", "34", "", {})


def test_the_library_does_not_warn_that_its_time_limits_are_off(caplog, monkeypatch):
    monkeypatch.setattr("math_verify.parser.TIMEOUT_WARNING_SHOWN", False)
    monkeypatch.setattr("math_verify.grader.TIMEOUT_WARNING_SHOWN", False)
    logging.getLogger("math_verify").setLevel(logging.NOTSET)
    math_verifier.load()
    assert not caplog.records
