"""What is said of a config: messages.yaml has the exact words; every type and bound is tried beside its edges."""

import math
import re

import pytest
from config_problems import (
    VALID,
    WRONG,
    assert_one,
    changes_of,
    config_with,
    messages,
    options,
    problems,
    types,
    verdict,
)

from dapo_jax.command.validation import BOUNDS, CHOICES, validate
from dapo_jax.config.values import DEFAULTS, MAY_BE_INFINITE, with_values

FILE = messages()
RENEW = "if that is meant: python tests/config_problems.py"
FILTER = "algorithm.filter_groups"


@pytest.mark.parametrize("name", FILE["cases"])
def test_what_is_said_of_a_config_is_in_the_file(name):
    for case in FILE["cases"][name]:
        assert verdict(changes_of(case)) == {key: case[key] for key in case.keys() - changes_of(case).keys()}, RENEW


def test_the_type_the_bounds_and_the_readers_of_each_option_are_in_the_file():
    assert options() == FILE["options"], RENEW


def test_no_message_holds_a_secret():
    asked = [case for group in FILE["cases"].values() for case in group if "secret" in str(changes_of(case))]
    assert len(asked) == 2 and not any("secret" in str(case["refused"]) for case in asked)


def fits(value, kind):
    """Whether a value is of a type, described as in a message."""
    if kind.endswith(" or null"):
        return value is None or fits(value, kind.removesuffix(" or null"))
    if several := re.fullmatch(r"(several|2) values, each (.*)", kind):
        counted = isinstance(value, tuple) and (several[1] == "several" or len(value) == 2)
        return counted and all(fits(part, several[2]) for part in value)
    return type(value) in {"an integer": [int], "a number": [int, float], "True or False": [bool], "text": [str]}[kind]


@pytest.mark.parametrize(
    "value", [True, 7, 1.5, None, "7", (), (7,), ("7",), (True, 7), (1.5, 7), (1.5, 7, 7)], ids=repr
)
def test_a_value_that_is_not_of_an_options_type_is_refused(value):
    given = dict.fromkeys(DEFAULTS, value) | {"workdir": WRONG}  # not a number: no other rule is tried
    wrong = {key: given[key] for key, kind in types().items() if not fits(given[key], kind)}
    assert problems(with_values(VALID, given)) == [
        f"{key}={found!r} must be {types()[key]}: correct it" for key, found in wrong.items()
    ]


@pytest.mark.parametrize("value", [3, 1.5, True], ids=repr)
def test_a_number_in_place_of_text_or_several_values_is_refused_before_other_rules_read_it(value):
    for key, kind in types().items():
        if kind.removesuffix(" or null") == "text" or kind.startswith(("several", "2 ")):
            assert problems(with_values(VALID, {key: value})) == [f"{key}={value!r} must be {kind}: correct it"]


def test_numbers_are_finite_and_have_32_bits():
    def refused(kind, value, rule):
        keys = [key for key, found in types().items() if found.removesuffix(" or null") == kind]
        found = problems(with_values(VALID, dict.fromkeys(keys, value) | {"workdir": WRONG}))
        return set(keys) - {key for key in keys if f"{key}={value} must be {rule}" not in found}, set(keys)

    for value in (math.nan, math.inf, -math.inf):
        found, keys = refused("a number", value, "a finite number: correct it")
        assert found == keys - set(MAY_BE_INFINITE if value == math.inf else ())
    for value in (2**31, -(2**31), 2**31 - 1):
        found, keys = refused("an integer", value, "less than 2**31: lower it")
        assert found == (keys if abs(value) == 2**31 else set())


def edges(rule, step):
    """The values next to the bounds of a rule: those that it allows, and those that it does not."""
    known = {
        "greater than 0, or null": ((None, step), (0, -step)),
        "greater than 0, or -1 (": ((-1, step), (0, -2)),
        "greater than 0": ((step,), (0, -step)),
        "greater than 1": ((1 + step,), (1,)),
        "0 or more, or -1 (": ((-1, 0), (-2,)),
        "0 or more": ((0,), (-step,)),
        "0 (": ((0,), (-step,)),
        "0 or 1": ((0, 1), (-1, 2)),
        "in 0..255": ((0, 255), (-1, 256)),
        "in [0, 1]": ((0, 1), (-step, 1 + step)),
        "in (0, 1]": ((step, 1), (0, 1 + step)),
        "at most 1024": ((1024,), (1025,)),
        "at most 1": ((1,), (1 + step,)),
        "two numbers in [0, 1)": (((0, 1 - step),), ((0.5, 1), (1, 0.5), (-step, 0.5))),
        "even": ((2,), (1, 3)),
        "one of ": (rule.removeprefix("one of ").removesuffix(", or FILE.py:function").split(", "), ("other",)),
    }
    return next(values for start, values in known.items() if rule.startswith(start))


def test_the_values_next_to_a_bound_are_allowed_and_refused():
    for key, bound in BOUNDS:
        inside, outside = edges(bound.rule, 1 if types()[key].startswith("an integer") else 1e-9)
        assert [bound.problems(key, value) for value in inside] == [[]] * len(inside)
        estimators = ("grpo", "gae") if None in inside else ("grpo",)  # the critic's sizes may be null
        for changes in ({"algorithm.adv_estimator": name, key: value} for value in outside for name in estimators):
            assert f"{key}={changes[key]!r} must be {bound.rule}" in problems(changes)
        assert key not in CHOICES or inside == [*CHOICES[key]]


def test_json_that_is_too_deep_is_refused():
    rule = r"must be a JSON object \(maximum recursion .*\): write it like .*"
    for text in ("[" * 10**5, '{"a":' * 10**5):
        assert_one(problems({"data.chat_template_kwargs": text}), f"^data.chat_template_kwargs='.{{100}}' {rule}$")


@pytest.mark.parametrize("metric", ["accuracy", "acc_reward", "overlong", "reward_model"])
def test_another_verifier_may_measure_a_run_than_the_one_that_filtered_it(metric):
    config = config_with({f"{FILTER}.metric": metric})
    assert problems(config) != []
    validate(config, training=False)
