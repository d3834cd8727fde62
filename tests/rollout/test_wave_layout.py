import numpy as np
import pytest

from dapo_jax.rollout.wave_layout import SPREAD, WaveLayout

LAYOUTS = [
    WaveLayout(*sizes, width=64, at_once=at_once)  # prompts, samples, shards
    for sizes, at_once in [((48, 16, 16), 2), ((24, 6, 8), 1), ((21, 8, 3), 3), ((12, 1, 4), 9), ((5, 16, 1), 2)]
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
def test_parts_are_equal_leave_nothing_out_and_start_the_rows_of_their_prompts(layout):
    parts = list(layout.parts())
    assert len({len(layout.prefilled(first)) for first in parts}) == 1
    assert layout.part_size <= layout.at_once * layout.shards
    assert set(np.concatenate([layout.prefilled(first) for first in parts])) == set(range(layout.size))
    assert set(np.concatenate([layout.started(first) for first in parts])) == set(range(layout.num_rows))
    blocks = layout.shards // layout.copies  # what one prefills together is what each of its shards then holds
    for first in parts:
        started = layout.rows()[layout.started(first)] // layout.num_samples
        prefilled = np.repeat(layout.prefilled(first).reshape(blocks, -1), layout.copies, axis=0)
        np.testing.assert_array_equal(started, np.repeat(prefilled.reshape(-1), layout.own_samples))
