"""The simulation of schedules: its rooflines by hand, and what its parts must add up to."""

import numpy as np
import pytest
import simulate_ahead
from decoding_roofline import SAMPLES, Machine, Simulation
from shapes import ARCH
from simulate_decoding import LIMIT, Prompts, main, segment, staleness

from dapo_jax.parallel.devices import Limits
from dapo_jax.rollout.layout import Layout, PrefillSize


@pytest.mark.parametrize("bandwidth", [1e3, 1e9])
def test_a_chunk_by_hand(bandwidth):
    """Two shards of two devices: rows that read 3 pages and 1 page on the first, 1 page on the second."""
    sizes = {"shards": 2, "ladder": (2, 1), "chunk": 8, "pages": 9, "page_length": 8, "row_pages": 4}
    layout = Layout(1, **sizes, prefills=(PrefillSize(24, 2),))
    machine = Machine(ARCH, Limits("device", None, flops=1e6, bandwidth=bandwidth, link=None), 2, 2, free=0.0)
    queue = Simulation(machine, layout, limit=8)
    queue.add(np.array([25, 9, 9]), np.array([[8], [1], [5]]))()
    weights = 2 * (2 * 48 * 64 + 2 * 48 * 32 + 3 * 48 * 80) + 64 * 48
    keys = (3 + 1 + 2) * 8  # pages, and a tail for each slot
    operations = 2 * 2 * weights + keys * 2 * 4 * 4 * 16
    read = 2 * weights + keys * 2 * 2 * 2 * 16 * 2
    assert queue.decodes == {(2, 0): 1}
    assert queue.seconds == pytest.approx(8 * max(operations / 1e6, read / bandwidth) / 2)
    assert queue.drawn == 8 + 1 + 5


@pytest.mark.parametrize("length", [100, 8192, LIMIT])
def test_segments_of_all_steps_add_up_to_the_responses(length):
    prompts = Prompts.draw([0], 20, 1.0)
    steps = [segment(prompts, age, length) for age in range(-(-LIMIT // length))]
    assert sum(drawn.sum() for _, drawn in steps) == prompts.responses.sum()
    assert all((drawn > 0).all() and (drawn <= length).all() for _, drawn in steps)
    begun, drawn = steps[0]
    assert len(begun) == prompts.responses.size and (begun.reshape(20, SAMPLES) == prompts.lengths[:, None]).all()
    assert all(begun.min(initial=LIMIT) >= age * length for age, (begun, _) in enumerate(steps))


def test_staleness_by_hand():
    """Segments of 4: the first group ends in its third step, the second in its first."""
    first, most, tokens = staleness(np.array([[5, 12], [4, 4]]), 4)
    assert (first, most) == (1.0, 2)
    assert tokens == pytest.approx((4 * 2 + 1 * 1 + 4 * 2 + 4 * 1) / 25)


@pytest.mark.slow
def test_the_command_prints_a_row_for_each_shape(capsys):
    small = ["--target", "2", "--keep-rate", "0.5", "--steps", "1"]
    main(["--shape", "7B v5p:2x2x4", "7B h100:8", "0.5B h100:1, 256 rows", *small])
    first, second, third = (table.splitlines() for table in capsys.readouterr().out.split("\n\n"))
    assert first[4].startswith("| 0.5B h100:1, 256 rows | 32 | 32, 16, 8 |") and "segments" not in second[0]
    assert first[2].startswith("| 7B v5p:2x2x4 | 8 |") and third[4].startswith("| 0.5B h100:1, 256 rows |")
    for row in second[2:4]:
        *_, ratio, rounds, drawn = map(float, row.strip("| ").split(" | ")[1:])
        assert 0 < ratio <= 1 and 2 < rounds < 3 and drawn > 1 / 0.5, "one queue is not slower than rounds"
    main(["--shape", "7B h100:8", "--segment-length", "0", *small])
    assert "segments" not in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--keep-rate", "0"])


def test_batches_ahead_by_hand():
    """Sampling of 1 and 3 seconds in turn beside training of 2: with one batch ahead each step waits for the longer."""
    equal, varying = np.full(4, 3.0), np.array([1.0, 3.0] * 2)
    assert all(simulate_ahead.one_by_one(equal, 2.0, ahead) == pytest.approx(3) for ahead in (1, 2, 4))
    one, two, four = (simulate_ahead.one_by_one(varying, 2.0, ahead) for ahead in (1, 2, 4))
    assert one == pytest.approx(2.5, abs=0.1) and one >= two >= four >= 2


@pytest.mark.slow
def test_a_row_for_training_at_its_own_speed_and_one_as_long_as_sampling(capsys):
    simulate_ahead.main(["--shape", "7B h100:8", "--target", "2", "--keep-rate", "0.5", "--batches", "4"])
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0] for row in rows] == [f"2 x h100:8, {text}" for text in ("equal", "equal, balanced")] + [
        f"2 x h100:8, {text}" for text in ("long-tailed", "long-tailed, balanced")
    ]
    for _, sampling, training, _, one, *rest in rows:
        assert int(one) >= max(int(sampling), int(training)) - 1 and all(int(x) <= int(one) + 1 for x in rest)
