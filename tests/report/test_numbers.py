"""Sums over steps, and numbers as a reader wants them."""

from run_folder import row_of

from dapo_jax.tools.report.numbers import (
    alarm_steps,
    duration,
    groups,
    letter,
    mean,
    number,
    percent,
    stage_seconds,
    total,
)
from dapo_jax.tools.report.numbers import step_ranges as ranges

ROWS = [row_of(step) for step in range(1, 5)]


def test_numbers_have_three_digits_and_shares_and_times_are_read_at_a_glance():
    shown = {0: "0", 0.03125: "0.0312", 12.54: "12.5", 1936.0: "1,936", 3e-7: "3.00e-7", -0.5: "-0.500", 40: "40"}
    shown |= {None: "-", float("nan"): "-", "3": "-", 9.999: "10.0", 2e9: "2.00e9"}
    assert {value: number(value) for value in shown} == shown and number(True) == "-"
    shares = {0: "0%", 0.0004: "<0.1%", 0.034: "3.4%", 0.4: "40%", 1: "100%", None: "-"}
    assert {share: percent(share) for share in shares} == shares
    times = {0.25: "0.25 s", 59.4: "59 s", 60: "1 min 0 s", 3599.6: "1 h 0 min", 3600: "1 h 0 min", 90061: "25 h 1 min"}
    assert {seconds: duration(seconds) for seconds in times} == times


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
    assert ranges([(2, 3), (5, 5)]) == "2–3, 5"
    assert ranges([(step, step) for step in range(9)], most=2) == "0, 1 and 7 more"


def test_every_run_has_a_letter_of_its_own():
    assert [letter(run) for run in (0, 1, 25, 26, 27)] == ["A", "B", "Z", "AA", "AB"]
    assert len({letter(run) for run in range(800)}) == 800
