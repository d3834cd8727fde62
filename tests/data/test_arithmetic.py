import dataclasses
import itertools

import pytest

from dapo_jax.config.sections import ArithmeticConfig
from dapo_jax.data.arithmetic import OPERATORS, arithmetic_rows

TASK = ArithmeticConfig(operators="+-*", low=-3, high=8, num_train=60, num_heldout=41)


def make(seed=5, **changes):
    return arithmetic_rows(dataclasses.replace(TASK, **changes), seed)


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


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"low": 7}, {"7 - 8 =": "-1", "8 - 7 =": "1", "7 * 8 =": "56", "8 + 8 =": "16"}),
        (
            {"operators": ">", "low": 3, "high": 4, "template": "larger: {a} or {b}?"},
            {"larger: 3 or 3?": "3", "larger: 3 or 4?": "4", "larger: 4 or 3?": "4", "larger: 4 or 4?": "4"},
        ),
    ],
)
def test_known_answers(changes, expected):
    train, heldout = make(num_train=0, num_heldout=0, **changes)
    answers = {row.prompt[0]["content"]: row.ground_truth for row in train}
    assert answers.items() >= expected.items() and heldout == []


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


def test_rows_are_a_pure_function_and_held_out_ones_do_not_depend_on_the_number_of_the_others():
    assert make() == make()
    assert make(seed=6)[0] != make()[0] and make(seed=6)[1] != make()[1]
    assert make(num_train=7)[1] == make()[1] == make(num_train=0)[1]
    wide = make(low=0, high=10**6, num_train=20, num_heldout=10)  # sampled without listing them
    assert [len(rows) for rows in wide] == [20, 10]


@pytest.mark.parametrize(
    "changes, message",
    [
        *[({"operators": "+/"}, r"operators='\+/' must be some of \+-\*"), ({"operators": "++"}, "each once")],
        *[({"operators": ""}, "must be some of"), ({"low": 9}, "low=9 must not exceed high=8")],
        ({"template": "{a} + {b}"}, "must have the fields"),
        ({"num_train": 400}, "make 432 problems, too few for num_train=400 and num_heldout=41"),
        *[({"num_heldout": 433, "num_train": 0}, "too few"), ({"num_heldout": 432, "num_train": 0}, "too few")],
    ],
)
def test_impossible_arguments_are_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)
