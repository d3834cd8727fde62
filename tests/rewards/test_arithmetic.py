import pytest
from ends_within import ends_within

from dapo_jax.rewards import arithmetic


def check(solution, ground_truth):
    return arithmetic.score("arithmetic", solution, ground_truth, {})


@pytest.mark.parametrize(
    ("solution", "pred"),
    [
        ("34", "34"),
        ("The answer is 34.", "34"),
        ("first 12, then 34", "34"),
        ("1,234", "1234"),
        ("1,2345", "2345"),
        ("-5", "-5"),
        ("= -5", "-5"),
        ("it is -5.", "-5"),
        ("(-5)", "-5"),
        ("**-5**", "-5"),
        (r"$\boxed{-5}$", "-5"),
        ("= \N{MINUS SIGN}5", "-5"),
        ("7--5", "-5"),
        ("7\n-5", "-5"),
        ("7-5", "5"),
        ("7 -5", "5"),
        ("7 - 5", "5"),
        ("(3+4)-5", "5"),
        ("x-5", "5"),
        ("3.5", "3.5"),
        ("no number", ""),
        ("", ""),
    ],
)
def test_the_last_number_is_the_answer(solution, pred):
    assert check(solution, "99") == {"score": 0.0, "acc": False, "pred": pred}
    if pred:
        assert check(solution, pred) == {"score": 1.0, "acc": True, "pred": pred}


def test_numbers_are_compared_not_their_spelling():
    assert check("it is 007", "7")["acc"]
    assert check("it is 7.0", "7")["acc"]
    assert check("it is 1200", "1,200")["acc"]
    assert not check("it is 3.5", "5")["acc"]


def test_a_ground_truth_that_is_not_a_number_is_an_error():
    with pytest.raises(ValueError, match="ground_truth='seven' must be a number"):
        check("7", "seven")


@pytest.mark.parametrize("text", ["1", "-", "1,111", "111,", "0 ", "\0\ud800"])
def test_hostile_texts_are_wrong_and_end(text):
    with ends_within():
        assert not check(text * (400_000 // len(text)), "34")["acc"]
