"""Curves as SVG: round ticks, nothing lost where there are many points, gaps where there is no number."""

import json
import math
import re

import pytest

from dapo_jax.tools.report.curves import HEIGHT, LEFT, RIGHT, TOP, WIDTH, Line, Point, draw, points, ticks, value_range
from dapo_jax.tools.report.curves import tick_label as label


def line(values, run=0, letter=""):
    return Line("a run", run, letter, [Point(step, step, value) for step, value in enumerate(values)])


def drawn(*lines):
    """The data of the readout, and the paths of dots and of lines."""
    svg = str(draw("Title", "steps", lines))
    data = json.loads(re.findall(r'data-lines="(.*?)"', svg)[0].replace("&#34;", '"'))
    return data, *(re.findall(rf'class="{kind} [^"]*" d="(.*?)"', svg) for kind in ("dots", "line"))


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 0.047), (3.8, 4.01), (-3e-8, 2e-8), (0, 8432), (5, 6)])
def test_ticks_are_few_round_numbers_within_the_range(low, high):
    found = ticks(low, high)
    assert 2 <= len(found) <= 5 and low - 1e-12 <= found[0] and found[-1] <= high * (1 + 1e-9)
    spacing = found[1] - found[0]
    assert all(math.isclose(b - a, spacing) for a, b in zip(found, found[1:], strict=False))
    assert f"{spacing:.0e}"[0] in "125" and math.isclose(spacing, float(f"{spacing:.0e}"))
    texts = [label(value, spacing) for value in found]
    assert len(set(texts)) == len(texts)


def test_tick_labels_are_short():
    shown = {(0, 0.05): "0", (0.05, 0.05): "0.05", (0.1, 0.05): "0.10", (500, 500): "500", (1500, 500): "1,500"}
    shown |= {(5000, 5000): "5,000", (20000, 5000): "20k", (2e-7, 1e-7): "2e-7", (3e6, 1e6): "3M"}
    assert {(value, spacing): label(value, spacing) for value, spacing in shown} == shown


def test_the_range_begins_at_zero_unless_the_values_are_far_from_it():
    assert value_range([0.2, 0.9])[0] == 0
    low, high = value_range([3.8, 4.0])
    assert 3.7 < low < 3.8 and 4 < high < 4.1
    for same in (0.0, 5.0, -2.0):
        low, high = value_range([same, same])
        assert low <= same < high and math.isfinite(low)


def test_points_lie_within_the_picture_and_higher_values_above():
    _, [dots], [path] = drawn(line([1.0, 3.0, 2.0]))
    places = [tuple(map(float, place.split())) for place in re.findall(r"M([\d.]+ [\d.]+)h0", dots)]
    assert [x for x, _ in places] == [LEFT, (LEFT + WIDTH - RIGHT) / 2, WIDTH - RIGHT]
    assert TOP <= places[1][1] < places[2][1] < places[0][1] <= HEIGHT
    assert path.count("M") == 1 and path.count("L") == 2


def test_a_value_that_is_not_finite_is_a_gap():
    data, _, [path] = drawn(line([1.0, 2.0, None, 4.0, 5.0]))
    assert path.count("M") == 2 and path.count("L") == 2
    assert data[0]["step"] == [0, 1, 3, 4]
    assert points([{"step": 1, "m": None}, {"step": 2, "m": 3}, {"step": 3}], "m", "steps") == [(1, 1, None), (2, 2, 3)]


def test_many_points_keep_their_extremes_and_get_a_smoothed_line():
    values = [math.sin(step / 300) for step in range(10_000)]
    values[5_003] = 40.0
    data, [dots], [path] = drawn(line(values))
    assert "40" in data[0]["value"] and data[0]["step"][data[0]["value"].index("40")] == 5_003
    assert len(data[0]["x"]) <= 2 * WIDTH and dots.count("M") == len(data[0]["x"])
    heights = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", path)]
    assert len(heights) <= 2 * WIDTH and min(heights) > TOP + 50  # the peak is a dot, not the line


def test_letters_of_runs_that_end_together_do_not_overlap():
    lines = [line([1.0, 2.0 + run / 1000], run, letter) for run, letter in enumerate("ABC")]
    found = re.findall(r'y="([\d.]+)" class="letter r(\d)">(\w)<', str(draw("Title", "steps", lines)))
    heights = sorted(float(y) for y, _, _ in found)
    assert {(run, letter) for _, run, letter in found} == {("0", "A"), ("1", "B"), ("2", "C")}
    assert all(below - above >= 12 for above, below in zip(heights, heights[1:], strict=False))


def test_one_point_is_no_curve():
    assert draw("Title", "steps", [line([1.0])]) == "" and draw("Title", "steps", [line([None, None])]) == ""
