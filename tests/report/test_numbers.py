"""Sums over steps, and numbers as a reader wants them."""

import pytest
from run_folder import row_of

from dapo_jax.report.numbers import (
    alarm_steps,
    duration,
    groups,
    letter,
    mean,
    number,
    percent,
    stage_seconds,
    step_ranges,
    total,
)

ROWS = [row_of(step) for step in range(1, 5)]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.03125, "0.0312"), (12.54, "12.5"), (1936.0, "1,936"), (3e-7, "3.00e-7"), (-0.5, "-0.500"), (40, "40")]
    + [(None, "-"), (float("nan"), "-"), (True, "-"), ("3", "-"), (9.999, "10.0"), (2e9, "2.00e9")],
)
def test_numbers_have_three_digits(value, text):
    assert number(value) == text


def test_shares_and_times_are_read_at_a_glance():
    assert [percent(share) for share in (0, 0.0004, 0.034, 0.4, 1, None)] == ["0%", "<0.1%", "3.4%", "40%", "100%", "-"]
    assert [duration(s) for s in (0.25, 59.4, 60, 3599.6, 3600, 90061)] == [
        *("0.25 s", "59 s", "1 min 0 s", "1 h 0 min", "1 h 0 min", "25 h 1 min"),
    ]


def test_sums_leave_out_what_is_no_number():
    rows = [{"step": 1, "m": 2.0}, {"step": 2, "m": None}, {"step": 3}, {"step": 4, "m": 4.0}]
    assert total(rows, "m") == 6 and mean(rows, "m") == 3 and mean(rows, "none") is None


def test_groups_add_up_to_those_that_were_sampled():
    found = groups(ROWS)
    assert found == {"sampled": 80, "kept": 48, "all_correct": 12, "all_wrong": 20, "other": 0}


def test_stages_add_up_to_the_time_of_steps_and_of_what_is_outside():
    found = stage_seconds([{"step": 0, "timing_s/testing": 7.0}, *ROWS])
    assert found == {"gen": 24, "update_actor": 12, "testing": 7, "other": 4} and list(found)[0] == "gen"
    assert sum(found.values()) == total(ROWS, "timing_s/step") + 7


def test_alarms_are_ranges_of_the_rows_that_have_them():
    rows = [{"step": step, "alarm/a": float(step in (2, 3, 5))} for step in range(1, 6)]
    rows += [{"step": 10, "alarm/b": 1.0}, {"step": 11}, {"step": 20, "alarm/b": 1.0}]  # only evaluations have b
    assert alarm_steps(rows) == {"a": [(2, 3), (5, 5)], "b": [(10, 20)]}
    assert step_ranges([(2, 3), (5, 5)]) == "2–3, 5"
    assert step_ranges([(step, step) for step in range(9)], most=2) == "0, 1 and 7 more"


def test_every_run_has_a_letter_of_its_own():
    assert [letter(run) for run in (0, 1, 25, 26, 27)] == ["A", "B", "Z", "AA", "AB"]
    assert len({letter(run) for run in range(800)}) == 800
