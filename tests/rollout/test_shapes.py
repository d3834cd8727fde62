import itertools

import numpy as np
import pytest
from jax.sharding import AbstractMesh
from small_policy import engine_settings

from dapo_jax.data.padding import bucket, pad_prompts
from dapo_jax.parallel.mesh import AXES
from dapo_jax.rollout.round_walk import expected_shapes
from dapo_jax.rollout.shapes import (
    FIRST_WINDOW,
    ROW_MULTIPLE,
    LengthHistory,
    prompt_width,
    rows_in_memory,
    rungs,
    wave_size,
    windows,
)
from dapo_jax.rollout.wave_layout import WaveLayout


def test_buckets_are_few_and_close():
    sizes = sorted({bucket(length) for length in range(1, 2000)})
    assert sizes[:8] == [4, 6, 8, 12, 16, 24, 32, 48]
    assert all(length <= bucket(length) <= max(1.5 * length, 4) for length in range(1, 2000))


def test_prompts_are_padded_on_the_left():
    tokens, mask = pad_prompts([[1, 2], [3]], 4, 9)
    np.testing.assert_array_equal(tokens, [[9, 9, 1, 2], [9, 9, 9, 3]])
    np.testing.assert_array_equal(mask, [[False, False, True, True], [False, False, False, True]])


def test_waves_are_equal_and_fit_rows_and_devices():
    assert wave_size(8, 4, max_rows=64, shards=8) == 8
    assert wave_size(9, 4, max_rows=64, shards=8) == 16
    assert wave_size(40, 4, max_rows=64, shards=8) == 16  # 64 rows at most: 16 prompts
    assert wave_size(1, 100, max_rows=64, shards=8) == 8  # never less than one prompt a device
    assert wave_size(40, 4, max_rows=64, shards=1) == 14  # three waves of 14, not two of 16 and one of 8


def test_prompts_are_as_wide_as_a_bucket_and_short_ones_share_a_width():
    assert [prompt_width(longest, 256) for longest in (3, 64, 65, 200, 256)] == [64, 64, 96, 256, 256]


@pytest.mark.parametrize("longest", [1, 2, 12, 65, 100, 500, 8192])
@pytest.mark.parametrize("chunk", [1, 11, 32, 128])
def test_windows_are_whole_chunks_up_to_a_whole_response(longest, chunk):
    found = windows(longest, chunk)
    assert found == sorted(set(found)) and all(width % chunk == 0 for width in found)
    assert found[-1] >= longest - 1 and found[-1] - chunk < max(longest - 1, 1)
    steps = [(before, after - chunk) for before, after in itertools.pairwise(found)]
    assert all(after <= min(max(1.5 * before, FIRST_WINDOW), before + 512) for before, after in steps)


def test_rows_become_fewer_by_about_a_third():
    assert rungs(64, 8) == [64, 48, 32, 24, 16, 8] and rungs(100, 4) == [100, 72, 48, 32, 24, 16, 8, 4]
    assert rungs(8, 8) == [8] and rungs(5, 1) == [5, 4, 2, 1] and rungs(1, 1) == [1] and rungs(64, 32) == [64, 48, 32]
    assert rungs(6, 1) == [6, 4, 2, 1]
    assert all(before / after < 2.01 for before, after in itertools.pairwise(rungs(1000, 1)))


def history_of(lengths, longest=256):
    history = LengthHistory(longest)
    for _ in range(60):
        history.add(np.array(lengths))
    return history


def test_the_history_says_how_many_responses_go_on():
    assert LengthHistory(8).alive(7) == 1.0 and LengthHistory(8).alive(8) == 0.0
    history = history_of([2, 2, 4, 8], 8)
    np.testing.assert_allclose([history.alive(n) for n in (0, 2, 4, 7, 8)], [1, 0.5, 0.25, 0.25, 0], atol=1e-6)
    history.add(np.array([8]))
    assert history.alive(4) == pytest.approx(0.25 + 0.3 * 0.75)


def expected(history, rows=64, *, lookahead=0, width=8):
    """(rows, window) of an engine with this history, on one device."""
    settings = engine_settings(
        AbstractMesh((1, 1, 1), AXES), max_response_length=256, chunk_length=32, smallest_rows=8, lookahead=lookahead
    )
    layout = WaveLayout(size=rows // 4, num_samples=4, shards=1, width=width, at_once=99)
    return [(shape.rows, shape.window) for shape in expected_shapes(settings, layout, history)]


def test_the_expected_shapes_follow_the_history():
    assert expected(LengthHistory(256)) == [(64, 64), (64, 96), (64, 128), (64, 192), (64, 256)]
    short = history_of([20] * 40 + [60] * 20 + [256] * 4)
    assert expected(short) == [(64, 64), (24, 64), (8, 96), (8, 128), (8, 192), (8, 256)]
    # knowledge that is a chunk old keeps rows longer
    assert expected(short, lookahead=1) == [(64, 64), (24, 96), (8, 128), (8, 192), (8, 256)]


def test_typical_lengths_are_those_of_the_history():
    history = history_of([2, 2, 4, 8], 8)
    lengths = history.typical(16)
    assert sorted(lengths) == [2] * 8 + [4] * 4 + [8] * 4 and list(lengths) != sorted(lengths)
    np.testing.assert_array_equal(lengths, history.typical(16))


def rows_of(memory, history, **changes):
    """With 10 bytes for a token of a row."""
    own = {"width": 64, "chunk_length": 32, "ladder": windows(256, 32), "lookahead": 0, "bytes_per_row": 0.0}
    return rows_in_memory(
        memory, **{**own, "cache_bytes": lambda tokens: tokens * 10.0, **changes}, alive=history.alive
    )


def test_as_many_rows_are_decoded_at_once_as_fit_the_memory():
    memory, unknown = 64 * 320 * 10, LengthHistory(256)
    assert rows_of(memory, unknown) == 64 and rows_of(10, unknown) == ROW_MULTIPLE  # never less
    # all have ended before the first window is full
    assert rows_of(memory, history_of([20])) == 64 * 320 // (64 + 64) // 8 * 8
    assert rows_of(memory, unknown, bytes_per_row=320 * 10.0) == 32  # as much again for something else
    windowed = rows_of(memory, unknown, cache_bytes=lambda tokens: min(tokens, 64) * 10.0)  # prompt and response each
    assert windowed == 64 * 320 // 128


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("lengths", [[20], [20, 60, 60, 256], list(range(1, 257)), [30] * 9 + [256]])
def test_no_moment_of_a_wave_takes_more_than_the_memory(lengths, lookahead):
    history = history_of(lengths)
    path = expected(history, rows_of(1e6, history, lookahead=lookahead), lookahead=lookahead, width=64)
    assert max(height * (64 + window) for height, window in path) * 10 <= 1e6


def test_a_history_is_restored():
    history, again = history_of([2, 4], 8), LengthHistory(8)
    again.restore(history.to_array())
    assert again.known and [again.alive(n) for n in range(9)] == [history.alive(n) for n in range(9)]
