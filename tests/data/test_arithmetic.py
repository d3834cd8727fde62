import itertools

import pytest

from dapo_jax.data.arithmetic import OPERATORS, arithmetic_rows

SETTINGS = dict(operators="+-*", low=-3, high=8, num_train=60, num_heldout=41, seed=5, template="{a} {operator} {b} =")


def make(**changes):
    return arithmetic_rows(**{**SETTINGS, **changes})


def problems(rows):
    return [tuple(row.extra_info[name] for name in ("a", "operator", "b")) for row in rows]


def test_rows_state_problem_answer_and_split():
    for split, rows in zip(("train", "heldout"), make(), strict=True):
        for index, row in enumerate(rows):
            a, operator, b = problems([row])[0]
            assert row.prompt == ({"role": "user", "content": f"{a} {operator} {b} ="},)
            assert row.ground_truth == str(OPERATORS[operator](a, b))
            assert row.data_source == "arithmetic"
            assert (row.extra_info["split"], row.extra_info["index"]) == (split, index)


def test_known_answers():
    train, _ = make(low=7, high=8, num_train=0, num_heldout=0)
    answers = {row.prompt[0]["content"]: row.ground_truth for row in train}
    problems_of_all_signs = ("7 - 8 =", "8 - 7 =", "7 * 8 =", "8 + 8 =")
    assert [answers[problem] for problem in problems_of_all_signs] == ["-1", "1", "56", "16"]


def test_the_larger_of_two_with_a_template_in_words():
    train, heldout = make(operators=">", low=3, high=4, num_train=0, num_heldout=0, template="larger: {a} or {b}?")
    answers = {row.prompt[0]["content"].removeprefix("larger: "): row.ground_truth for row in train}
    assert answers == {"3 or 3?": "3", "3 or 4?": "4", "4 or 3?": "4", "4 or 4?": "4"} and heldout == []


@pytest.mark.parametrize("seed", range(5))
def test_heldout_problems_are_not_in_training_in_either_order(seed):
    train, heldout = make(seed=seed)
    assert (len(train), len(heldout)) == (60, 41)
    seen = set(problems(train))
    assert len(seen) == 60 and len(set(problems(heldout))) == 41
    for a, operator, b in problems(heldout):
        assert (a, operator, b) not in seen
        assert operator == "-" or (b, operator, a) not in seen


def test_zero_train_takes_every_problem_that_is_not_held_out():
    everything = set(itertools.product(range(-3, 9), "+-*", range(-3, 9)))
    train, heldout = make(num_train=0, num_heldout=0)
    assert sorted(problems(train)) == sorted(everything) and heldout == []
    train, heldout = make(num_train=0)
    left = everything - set(problems(train)) - set(problems(heldout))
    # At most the second order of the last held-out problem is on neither side.
    assert len(left) <= 1 and len(train) + len(heldout) + len(left) == len(everything)


def test_rows_are_a_pure_function_of_the_arguments():
    assert make() == make()
    assert make(seed=6)[0] != make()[0] and make(seed=6)[1] != make()[1]


def test_heldout_rows_do_not_depend_on_the_number_of_training_rows():
    assert make(num_train=7)[1] == make()[1] == make(num_train=0)[1]


def test_wide_ranges_are_sampled_without_listing_them():
    train, heldout = make(low=0, high=10**6, num_train=20, num_heldout=10)
    assert (len(train), len(heldout)) == (20, 10)


@pytest.mark.parametrize(
    "changes, message",
    [
        *[({"operators": "+/"}, r"operators='\+/' must be some of \+-\*"), ({"operators": "++"}, "each once")],
        *[({"operators": ""}, "must be some of"), ({"low": 9}, "low=9 must not exceed high=8")],
        *[({"num_heldout": -1}, "must not be negative"), ({"template": "{a} + {b}"}, "must have the fields")],
        ({"num_train": 400}, "make 432 problems, too few for num_train=400 and num_heldout=41"),
        *[({"num_heldout": 433, "num_train": 0}, "too few"), ({"num_heldout": 432, "num_train": 0}, "too few")],
    ],
)
def test_impossible_arguments_are_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)
