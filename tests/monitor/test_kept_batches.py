"""The batches that a run keeps: of the chosen steps, or of the first with an alarm."""

import numpy as np
import pytest

from dapo_jax.monitor.kept_batches import KeptBatches, chosen_steps, read_batch


def arrays(step):
    return lambda: {"mask": np.full((2, 3), step)}


def kept_by(folder, choice, alarms):
    batches = KeptBatches(folder, choice)
    for step, alarm in enumerate(alarms, start=1):
        batches.hold(step, arrays(step))
        batches.keep(step, {"alarm/truncation": float(alarm), "loss": 1.0})
    return [step for step in range(1, len(alarms) + 1) if read_batch(folder, step) is not None]


@pytest.mark.parametrize(
    ("choice", "steps"), [("", []), ("2,14", [2, 14]), ("alarm", [1, *range(3, 12)])], ids=["none", "steps", "alarm"]
)
def test_the_chosen_steps_are_kept_or_the_first_ten_with_an_alarm(tmp_path, choice, steps):
    assert kept_by(tmp_path, choice, [True, False, *[True] * 12]) == steps
    for step in steps:
        found = read_batch(tmp_path, step)
        assert found is not None and found.keys() == {"mask"} and (found["mask"] == step).all()


def test_a_batch_is_kept_with_the_row_of_its_own_step_alone(tmp_path):
    batches = KeptBatches(tmp_path, "1,2")
    batches.hold(1, arrays(1))
    batches.keep(2, {})
    batches.keep(1, {})
    assert read_batch(tmp_path, 1) is None and read_batch(tmp_path, 2) is None


def test_batches_of_steps_that_are_repeated_are_dropped(tmp_path):
    """Else one of a step that has no alarm this time would remain, with other numbers."""
    assert kept_by(tmp_path, "alarm", [True] * 4) == [1, 2, 3, 4]
    KeptBatches(tmp_path, "", resume_step=2)
    assert [step for step in range(1, 5) if read_batch(tmp_path, step) is not None] == [1, 2]
    KeptBatches(tmp_path, "alarm")
    assert not list((tmp_path / "batches").iterdir())


@pytest.mark.parametrize("choice", ["0", "1,", "-1", "1-3", "alarms", "alarm,1", " 1", "²"])
def test_what_names_no_steps_is_told(choice):
    assert chosen_steps(choice) is None
