import json
import sys
import threading
import time
import types

import pytest
from waiting import wait_until

from dapo_jax.tools import plot

ROWS = [
    {"step": 0, "eval/a/acc/mean@4": 0.25},
    {"step": 1, "actor/entropy": 2.0, "dynamic_sampling/generated_tokens": 100, "timing_s/step": 2.5},
    {"step": 2, "actor/entropy": None, "dynamic_sampling/generated_tokens": 50, "timing_s/step": 1.5}
    | {"eval/a/acc/mean@4": 0.5, "eval/b/acc/mean@4": 0.75},
]


def write(folder, rows):
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(("x", "places"), [("steps", [0, 2]), ("tokens", [0, 150]), ("seconds", [0, 4.0])])
def test_points_stand_where_they_were_measured(x, places):
    assert plot.points(ROWS, None, x) == (places, [0.25, 0.625])
    assert plot.points(ROWS, "actor/entropy", x)[1] == [2.0]


def test_a_picture_of_two_runs(tmp_path):
    """One named by its workdir, one by its metrics, which end in the middle of a line."""
    pytest.importorskip("matplotlib")
    for name in "ab":
        write(tmp_path / name, ROWS)
    metrics = tmp_path / "b/metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"step": 3, "cut')
    plot.main([f"one={tmp_path / 'a'}", f"two={metrics}", f"--output={tmp_path / 'out' / 'curves.png'}"])
    assert (tmp_path / "out" / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_notebook_shows_the_curves_while_a_run_goes_on(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    pictures = []
    handle = types.SimpleNamespace(update=pictures.append)
    show = types.SimpleNamespace(Image=bytes, Markdown=str, display=lambda text, display_id: handle)
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(display=show))
    monkeypatch.setitem(sys.modules, "IPython.display", show)
    with pytest.raises(KeyboardInterrupt), plot.live_curves(tmp_path, every_s=0.01):
        time.sleep(0.05)
        assert not pictures  # no step has ended
        write(tmp_path, ROWS[:1])
        wait_until(lambda: pictures)
        write(tmp_path, ROWS)
        raise KeyboardInterrupt
    assert pictures[-1].startswith(b"\x89PNG") and pictures[-1] != pictures[0]
    assert "live_curves" not in [thread.name for thread in threading.enumerate()]
