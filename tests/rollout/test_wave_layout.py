import numpy as np
import pytest

from dapo_jax.rollout.wave_layout import SPREAD, WaveLayout

LAYOUTS = [
    WaveLayout(size=48, num_samples=16, shards=16, width=64, at_once=2),
    WaveLayout(size=24, num_samples=6, shards=8, width=64, at_once=1),
    WaveLayout(size=21, num_samples=8, shards=3, width=64, at_once=3),
    WaveLayout(size=12, num_samples=1, shards=4, width=64, at_once=9),
    WaveLayout(size=5, num_samples=16, shards=1, width=64, at_once=2),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_sample_has_a_row_beside_the_prompt_it_answers(layout):
    rows, prompts = layout.rows(), layout.prompts()
    assert sorted(rows) == list(range(layout.num_rows)) and len(prompts) == layout.num_prompts
    np.testing.assert_array_equal(rows // layout.num_samples, np.repeat(prompts, layout.own_samples))


def test_the_samples_of_a_prompt_lie_on_four_neighbouring_shards_if_these_divide_them():
    for layout, copies in zip(LAYOUTS, (4, 2, 1, 1, 1), strict=True):
        assert layout.copies == copies <= SPREAD
        shards = np.arange(layout.num_rows) // (layout.num_rows // layout.shards)
        for prompt in range(layout.size):
            own = shards[layout.rows() // layout.num_samples == prompt]
            assert sorted(set(own)) == list(range(own.min(), own.min() + copies))
            assert set(np.bincount(own)) <= {0, layout.own_samples}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_are_equal_and_leave_no_prompt_and_no_row_out(layout):
    parts = list(layout.parts())
    assert len({len(layout.prefilled(first)) for first in parts}) == 1
    assert layout.part_size <= layout.at_once * layout.shards
    assert set(np.concatenate([layout.prefilled(first) for first in parts])) == set(range(layout.size))
    assert set(np.concatenate([layout.started(first) for first in parts])) == set(range(layout.num_rows))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_part_starts_the_rows_of_its_prompts(layout):
    """What a block of shards prefills together is what each of them then holds."""
    blocks = layout.shards // layout.copies
    for first in layout.parts():
        started = layout.rows()[layout.started(first)] // layout.num_samples
        prefilled = np.repeat(layout.prefilled(first).reshape(blocks, -1), layout.copies, axis=0)
        np.testing.assert_array_equal(started, np.repeat(prefilled.reshape(-1), layout.own_samples))
