import json
from pathlib import Path

import pytest
from ends_within import ends_within

from dapo_jax.rewards import math_dapo

CASES = json.loads((Path(__file__).parent / "data" / "math_dapo.json").read_text())


def check(solution, ground_truth="34"):
    return math_dapo.score("", solution, ground_truth, {})


def check_lenient(solution, ground_truth="34"):
    return math_dapo.score_lenient("", solution, ground_truth, {})


def test_equals_the_reference_on_every_case():
    assert len(CASES) == 445
    for case in CASES:
        assert check(**case["inputs"]) == case["expected"], case["inputs"]


def test_lenient_accepts_all_that_the_reference_accepts():
    for case in CASES:
        assert check_lenient(**case["inputs"])["acc"] >= case["expected"]["acc"], case["inputs"]


def test_a_carriage_return_keeps_the_thousands_comma():
    assert check("Answer: 1,234\r\n", "1234")["pred"] == "1,234"
    assert check_lenient("Answer: 1,234\r\n", "1234")["acc"]


def test_only_the_end_of_the_solution_counts():
    assert check("Answer: 34" + " " * 290)["acc"]
    assert not check("Answer: 34" + " " * 291)["acc"]
    assert check(r"\boxed{34}" + " " * 90)["acc"]
    assert not check(r"\boxed{34}" + " " * 91)["acc"]
    assert check_lenient(r"\boxed{34}" + " " * 290)["acc"]
    assert not check_lenient(r"\boxed{34}" + " " * 291)["acc"]


@pytest.mark.parametrize(
    ("solution", "ground_truth"),
    [
        ("Answer: 34.", "34"),
        ("**Answer:** 34", "34"),
        ("**Answer: 34**", "34"),
        ("**Answer**: $34$.", "34"),
        ("Answer: 34.0", "34"),
        ("Answer: 034", "34"),
        ("Answer: +34", "34"),
        ("Answer: \N{MINUS SIGN}7", "-7"),
        (r"Answer: \(34\)", "34"),
        ("Answer:\n\\[\n\\boxed{034}\n\\]", "34"),
        (r"Answer: \$34.00", "34"),
        ("Answer: 2*17 = 34.", "34"),
        ("Answer: 34 cm.", "34"),
        ("Answer: 1{,}234.", "1234"),
        (r"so \boxed{34}", "34"),
        (r"so \boxed{ 34 }", "34"),
        (r"so \boxed{34^\circ}", "34"),
        (r"**Final Answer**: it is $\boxed{34}$. I hope so.", "34"),
        (r"Answer: $\frac12$.", r"\frac{1}{2}"),
        (r"so \boxed{ (1, 2) }", "(1,2)"),
    ],
)
def test_lenient_accepts_another_spelling(solution, ground_truth):
    assert check_lenient(solution, ground_truth) == {
        "score": 1.0,
        "acc": True,
        "pred": math_dapo.normalize(ground_truth),
    }


@pytest.mark.parametrize(
    "answer",
    [
        "3 4.",
        "3\t4.",
        "3,4.",
        "3{,}4.",
        "3_4.",
        "3**4.",
        "$3$4.",
        "$3$$4$.",
        "3.4.",
        "-34.",
        "340.",
        "134.",
        "34.5",
        "34!",
        "34%",
        "34e2",
        "34i",
        "34...",
        r"34\ldots.",
        r"34\dots.",
        "34/2.",
        "0x34.",
        r"\sqrt{34}.",
        r"\frac34.",
        "34 or 35.",
        "x >= 34.",
        "x != 34.",
        r"x \neq 34.",
        "34 million.",
        "\u0663\u0664.",
        "34\u00b2.",
    ],
)
def test_lenient_rejects_what_is_another_number(answer):
    assert not check_lenient(f"Answer: {answer}")["acc"]
    assert not check_lenient(rf"so \boxed{{{answer}}}")["acc"]


def test_lenient_does_not_join_the_numbers_of_the_ground_truth():
    assert not check_lenient(r"so \boxed{37}", "3,7")["acc"]
    assert not check_lenient(r"so \boxed{37}", "3 7")["acc"]
    assert not check_lenient(r"so \boxed{ 3 }", "$3$ or $7$")["acc"]


def test_lenient_gives_a_wrong_number_one_spelling():
    preds = {check_lenient(f"Answer: {answer}", "1")["pred"] for answer in ("35.", "035", "35.0", "**35**")}
    assert preds == {"35"}


@pytest.mark.parametrize("text", ["\\boxed{", "{", "Answer:", "Answer:*", "$", "1", "1,", "\0\ud800", "\n", "="])
def test_hostile_texts_are_wrong_and_end(text):
    solution = text * (400_000 // len(text))
    with ends_within():
        assert not check(solution)["acc"]
        assert not check_lenient(solution)["acc"]
