import json

import pytest

from dapo_jax.tools import plot

ROWS = [
    {"step": 0, "eval/a/acc/mean@4": 0.25},
    {"step": 1, "actor/entropy": 2.0, "dynamic_sampling/generated_tokens": 100, "timing_s/step": 2.5},
    {
        "step": 2,
        "actor/entropy": None,
        "dynamic_sampling/generated_tokens": 50,
        "timing_s/step": 1.5,
        "eval/a/acc/mean@4": 0.5,
        "eval/b/acc/mean@4": 0.75,
    },
]


@pytest.mark.parametrize(("x", "places"), [("steps", [0, 2]), ("tokens", [0, 150]), ("seconds", [0, 4.0])])
def test_points_stand_where_they_were_measured(x, places):
    assert plot.points(ROWS, None, x) == (places, [0.25, 0.625])
    assert plot.points(ROWS, "actor/entropy", x)[1] == [2.0]


def test_a_picture_of_two_runs(tmp_path):
    pytest.importorskip("matplotlib")
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    plot.main([f"one={tmp_path / 'a'}", f"two={tmp_path / 'b'}", f"--output={tmp_path / 'out' / 'curves.png'}"])
    assert (tmp_path / "out" / "curves.png").read_bytes().startswith(b"\x89PNG")
