import functools

import jax
import jax.numpy as jnp
import numpy as np

from dapo_jax.algorithms.advantages import grpo
from dapo_jax.algorithms.kept_samples import keep_samples

ROWS, GROUPS = 20, 2  # of the largest test; the others are padded to it


@functools.partial(jax.jit, static_argnames=("compute_new_adv", "norm"))
def advantages_and_kept(scores, groups, trained, pos, neg, *, compute_new_adv, norm):
    options = {"num_groups": GROUPS, "norm_adv_by_std_in_grpo": norm}
    advantages = grpo(scores[:, None], jnp.ones((ROWS, 1), bool), groups, **options)[0][:, 0]
    options |= {"keep_pos_ratio": pos, "keep_neg_ratio": neg, "compute_new_adv": compute_new_adv}
    return *keep_samples(advantages, scores, groups, trained, **options), advantages


def keep(scores, groups, *, pos=1.0, neg=1.0, new=False, norm=True, out=()):
    """New advantages, whether each is kept, and the advantages before."""
    rows, missing = len(scores), (0, ROWS - len(scores))
    arrays = np.pad(np.float32(scores), missing), np.pad(groups, missing, constant_values=GROUPS)
    found = advantages_and_kept(*arrays, ~np.isin(np.arange(ROWS), out), pos, neg, compute_new_adv=new, norm=norm)
    return tuple(np.asarray(one)[:rows] for one in found)


def test_the_best_good_and_the_worst_bad_samples_are_kept():
    scores = [0.0, 3.0, 1.0, 2.0, 9.0, 9.0, 8.0, 0.0]
    values, kept, before = keep(scores, [0] * 4 + [1] * 4, pos=0.5, neg=0.5)
    assert kept.tolist() == [True, True, False, False, True, True, False, True]
    np.testing.assert_array_equal(values, np.where(kept, before, 0))


def test_the_ratio_is_rounded_up_and_ties_are_kept_in_row_order():
    _, kept, _ = keep([1.0] * 3 + [0.0] * 5, [0] * 8, pos=0.3, neg=0.5)
    assert kept.tolist() == [True, False, False, True, True, True, False, False]
    assert keep([1.0] * 10 + [0.0] * 10, [0] * 20, pos=0.3)[1][:10].sum() == 3


def test_what_is_not_trained_on_is_neither_kept_nor_counted():
    scores = [1.0, 1.0, 0.0, 0.1, 0.2, 0.3]
    values, kept, before = keep(scores, [0] * 6, neg=0.5, out=(2, 3))
    assert kept.tolist() == [True, True, False, False, True, False]
    np.testing.assert_array_equal(values, np.where(kept, before, 0))
    renewed, third = keep(scores, [0] * 6, neg=0.5, out=(2, 3), new=True)[0], np.array([1.0, 1.0, 0.2])
    np.testing.assert_allclose(renewed[kept], (third - third.mean()) / third.std(ddof=1), rtol=1e-5)


def test_nothing_is_dropped_by_default():
    values, kept, before = keep([0.0, 1.0, 2.0, 5.0], [0, 0, 1, 1], new=True)
    assert kept.all()
    np.testing.assert_array_equal(values, before)


def test_kept_samples_are_normalised_again():
    values, kept, before = keep([0.0, 1.0, 4.0, 5.0, 1.0, 1.0, 1.0, 0.0], [0] * 4 + [1] * 4, pos=0.5, neg=0.5, new=True)
    assert kept.tolist() == [True, False, False, True, True, True, False, True]
    np.testing.assert_allclose(values[:4], [-1 / 2**0.5, 0, 0, 1 / 2**0.5], rtol=1e-5)
    third = np.array([1.0, 1.0, 0.0])
    expected = (third - third.mean()) / third.std(ddof=1)
    np.testing.assert_allclose(values[[4, 5, 7]], expected, rtol=1e-5)


def test_without_the_deviation_kept_samples_are_only_centred_again():
    values, _, _ = keep([0.0, 1.0, 4.0, 5.0], [0] * 4, pos=0.5, neg=0.5, new=True, norm=False)
    np.testing.assert_allclose(values, [-2.5, 0, 0, 2.5])


def test_a_group_with_fewer_than_two_kept_samples_stays_as_it_is():
    values, kept, before = keep([0.0, 0.0, 1.0, 1.0], [0] * 4, pos=1.0, neg=0.0, new=True)
    assert kept.tolist() == [False, False, True, True] and (values == 0).all()  # two, but equal
    values, kept, before = keep([0.0, 0.0, 0.0, 1.0], [0] * 4, pos=1.0, neg=0.0, new=True)
    assert kept.tolist() == [False, False, False, True]
    np.testing.assert_array_equal(values, [0, 0, 0, before[3]])
