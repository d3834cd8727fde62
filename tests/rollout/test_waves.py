from types import SimpleNamespace

import numpy as np

from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.rollout.waves import bucket, pad_prompts, wave_size


def test_buckets_are_few_and_close():
    sizes = sorted({bucket(length) for length in range(1, 2000)})
    assert sizes[:8] == [4, 6, 8, 12, 16, 24, 32, 48]
    assert all(length <= bucket(length) <= max(1.5 * length, 4) for length in range(1, 2000))


def test_prompts_are_padded_on_the_left():
    tokens, mask = pad_prompts([[1, 2], [3]], 4, 9)
    np.testing.assert_array_equal(tokens, [[9, 9, 1, 2], [9, 9, 9, 3]])
    np.testing.assert_array_equal(mask, [[False, False, True, True], [False, False, False, True]])


def test_waves_are_equal_and_fit_rows_and_devices():
    settings = SimpleNamespace(mesh=make_mesh(8, 1, 1), max_num_seqs=64)
    assert wave_size(8, 4, settings) == 8
    assert wave_size(9, 4, settings) == 16
    assert wave_size(40, 4, settings) == 16  # 64 rows at most: 16 prompts
    assert wave_size(1, 100, settings) == 8  # never less than one prompt a device
    settings = SimpleNamespace(mesh=make_mesh(1, 1, 8), max_num_seqs=64)
    assert wave_size(40, 4, settings) == 14  # three waves of 14, not two of 16 and one of 8
