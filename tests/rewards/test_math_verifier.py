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


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"first \boxed{7777}, but no: \boxed{34}", "34"),
        (r"first \boxed{34}, but no: \boxed{7777}", "7777"),
        (r"\boxed{7777} \boxed{34}", "34"),
        (r"\boxed{7777}, \boxed{\frac{1}{2}}. No: $x = \boxed{34}$", "34"),
        (r"$7777$. I hope it is correct. No, \boxed{34}", "34"),
        (r"the final answer is $7777$. I hope it is correct. No, \boxed{34}", "34"),
        (r"\boxed{34} Final answer is 7777. I hope it is correct.", "34"),
        (r"$\boxed{34}$. Check: the final answer is $7777$. I hope it is correct.", "34"),
        (r"\boxed{\boxed{34}}", "34"),
        (r"\boxed{1} and \boxed{34}", r"\{1, 34\}"),
        (r"$\boxed{1}$, $\boxed{2}$, or $\boxed{34}$", r"\{1, 2, 34\}"),
        (r"$\boxed{1} \text{ and } \boxed{34}$", r"\{1, 34\}"),
        ("\\boxed{1};\n\\boxed{34}", r"\{1, 34\}"),
        (r"\boxed{5}. \boxed{1}, \boxed{34}", r"\{1, 34\}"),
    ],
)
def test_the_last_answer_counts(solution, answer):
    answers = ("34", "7777", r"\{1, 34\}", r"\{1, 2, 34\}")
    assert [other for other in answers if math_verifier.score("", solution, other, {})["acc"]] == [answer]


@pytest.mark.parametrize("solution", [r"\boxed{34} or rather \boxed{", r"\boxed{34} \boxed{}", r"} \boxed}{34}"])
def test_an_empty_or_open_last_box_is_not_an_answer(solution):
    assert not math_verifier.score("", solution, "34", {})["acc"]


def test_a_ground_truth_that_is_not_mathematics_is_an_error():
    with pytest.raises(ValueError, match="ground_truth='' must be mathematics"):
        math_verifier.score("", "34", "", {})


def test_the_library_does_not_warn_that_its_time_limits_are_off(caplog, monkeypatch):
    monkeypatch.setattr("math_verify.parser.TIMEOUT_WARNING_SHOWN", False)
    monkeypatch.setattr("math_verify.grader.TIMEOUT_WARNING_SHOWN", False)
    logging.getLogger("math_verify").setLevel(logging.NOTSET)
    math_verifier.load()
    assert not caplog.records
