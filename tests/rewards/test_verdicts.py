"""Reference verdicts: a solution, its ground truth, whether it is right, and the answer that is read.

data/verdicts.json has the rules of each verifier with their cases, data/math_dapo.json cases of the paper's code,
data/readings.yaml spellings of answers.
"""

import json
import logging
from pathlib import Path

import pytest
import yaml

from dapo_jax.rewards import math_verifier
from dapo_jax.rewards.numerals import last_number, whole_number
from dapo_jax.rewards.verifiers import VERIFIERS, wrong_score

DATA = Path(__file__).parent / "data"
RULES = json.loads((DATA / "verdicts.json").read_text())
CASES = json.loads((DATA / "math_dapo.json").read_text())
READINGS = yaml.safe_load((DATA / "readings.yaml").read_text())


def score(name, solution, ground_truth="34"):
    return VERIFIERS[name].score("", solution, ground_truth, {})


@pytest.mark.parametrize(("name", "rule"), [(name, rule) for name, rules in RULES.items() for rule in rules])
def test_of_each_rule(name, rule):
    for solution, ground_truth, right, pred in RULES[name][rule]:
        found = score(name, solution, ground_truth)
        lowest = wrong_score(name, "any")
        expected = {"score": 1.0 if right else lowest, "acc": right, "pred": found["pred"] if pred is None else pred}
        assert found == expected and isinstance(found["pred"], str), (solution, ground_truth)


def test_mathematics_is_right_in_any_spelling_and_what_resembles_it_is_wrong():
    failed = []
    for truth, right, wrong in READINGS["math_verify"]:
        for expected, answer in [*((True, answer) for answer in right), *((False, answer) for answer in wrong)]:
            whole = any(mark in answer for mark in ("box", "answer", "答案"))
            if score("math_verify", answer if whole else rf"\boxed{{{answer}}}", truth)["acc"] != expected:
                failed.append((truth, answer, expected))
    assert failed == []


def test_numbers_are_read_alike_by_all_verifiers_that_compare_them():
    for text, number in READINGS["numbers"].items():
        assert last_number(text) == whole_number(text) == number, text
        for name in ("arithmetic", "gsm8k_flexible", "math_dapo_lenient"):
            for solution, truth in ((text, number), (number, text)):
                assert score(name, f"Answer: {solution}", truth)["acc"], (name, solution, truth)
    for text, number in READINGS["last_numbers"].items():
        assert last_number(text) == number and whole_number(text) is None, text


def test_math_dapo_is_the_reference_and_the_lenient_form_accepts_all_that_it_accepts():
    assert len(CASES) == 445
    for case in CASES:
        assert score("math_dapo", **case["inputs"]) == case["expected"], case["inputs"]
        assert score("math_dapo_lenient", **case["inputs"])["acc"] >= case["expected"]["acc"], case["inputs"]


@pytest.mark.parametrize(
    ("name", "answer", "most", "too_many"),
    [
        ("gsm8k", "#### 34", 293, 299),
        ("gsm8k_flexible", "#### 34", 293, 299),
        ("math_dapo", "Answer: 34", 290, 291),
        ("math_dapo", r"\boxed{34}", 90, 91),
        ("math_dapo_lenient", r"\boxed{34}", 290, 291),
    ],
)
def test_only_the_end_of_a_solution_counts(name, answer, most, too_many):
    assert score(name, answer + " " * most)["acc"]
    assert not score(name, answer + " " * too_many)["acc"]


@pytest.mark.parametrize(
    ("name", "ground_truth", "message"),
    [
        ("arithmetic", "seven", "ground_truth='seven' must be a number"),
        ("math_verify", "", "ground_truth='' must be mathematics"),
    ],
)
def test_a_ground_truth_that_cannot_be_read_is_an_error(name, ground_truth, message):
    with pytest.raises(ValueError, match=message):
        score(name, "7", ground_truth)


@pytest.mark.parametrize("text", ["\\boxed{", "\0\ud800"])
def test_text_that_is_no_mathematics_is_a_wrong_answer(text):
    assert not score("math_verify", text * 1000)["acc"]


def test_math_verify_does_not_warn_that_its_time_limits_are_off(caplog, monkeypatch):
    monkeypatch.setattr("math_verify.parser.TIMEOUT_WARNING_SHOWN", False)
    monkeypatch.setattr("math_verify.grader.TIMEOUT_WARNING_SHOWN", False)
    logging.getLogger("math_verify").setLevel(logging.NOTSET)
    math_verifier.load()
    assert not caplog.records
