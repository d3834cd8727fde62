import dataclasses

import jax
import numpy as np
import pytest
from dynamic_sampling import small_groups

from dapo_jax.config.sections import FilterGroupsConfig, LengthRewardConfig, OverlongBufferConfig
from dapo_jax.dynamic_sampling.rounds import filter_groups, filtered_counts
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.rewards.scoring import add_rewards


def by(metric: str, **options) -> FilterGroupsConfig:
    return FilterGroupsConfig(metric=metric, **options)


def experience(acc, *, lengths=2):
    return small_groups.experience(np.arange(len(acc)), acc, lengths=lengths, width=4)


@pytest.fixture
def mesh():
    """Eight rows a time: none of the sizes below divides into it."""
    mesh = make_mesh(8, 1, 1)
    with jax.set_mesh(mesh):
        yield mesh


def test_the_filter_marks_mixed_groups_on_any_number_of_rows(mesh):
    found = filter_groups(experience([[1, 1, 1], [0, 1, 0], [0, 0, 0], [1, 0, 1], [1, 1, 1]]), by("acc"), mesh)
    assert found.keep.tolist() == [False, True, False, True, False]
    np.testing.assert_allclose(found.metric_std, [0, 2**0.5 / 3, 0, 2**0.5 / 3, 0], rtol=1e-6)


def test_groups_of_one_sample_are_kept(mesh):
    assert filter_groups(experience([[0], [1], [0]]), by("acc"), mesh).keep.all()


def test_a_missing_metric_lists_what_there_is(mesh):
    groups = experience([[0, 1]])
    with pytest.raises(ValueError, match=r"metric='quality'.*\['acc', 'score'\]"):
        filter_groups(groups, by("quality"), mesh)
    half = groups.with_scores(quality=np.array([[1.0, np.nan]]))
    with pytest.raises(ValueError, match=r"metric='quality' is not measured for every sample.*\['acc', 'score'\]"):
        filter_groups(half, by("quality"), mesh)


def test_a_failed_verification_counts_like_the_lowest_of_its_group(mesh):
    groups = experience(np.zeros((4, 3)))
    failed = np.array([[True, False, False], [True, False, False], [True, True, False], [True, True, True]])
    nan = np.nan
    measured = np.array([[nan, 2.0, 2.0], [nan, 3.0, 1.0], [nan, nan, 5.0], [nan, nan, nan]])
    groups = dataclasses.replace(groups.with_scores(quality=measured), failed=failed)
    found = filter_groups(groups, by("quality"), mesh)
    assert found.keep.tolist() == [False, True, False, False]
    np.testing.assert_allclose(found.metric_std, [0, (8 / 9) ** 0.5, 0, 0], rtol=1e-6)
    np.testing.assert_array_equal(found.experience.scores["quality"], measured)
    nothing = dataclasses.replace(experience(np.zeros((2, 3))), failed=np.ones((2, 3), bool))
    assert not filter_groups(nothing, by("quality"), mesh).keep.any()
    below = by("quality", rule="mean_range", filter_low=-1.0, filter_high=9.0)
    assert filter_groups(groups, below, mesh).keep.tolist() == [True, True, True, False]
    with pytest.raises(ValueError, match="metric='quality' is not measured"):  # the one that did not fail has none
        filter_groups(dataclasses.replace(groups, failed=failed & (np.arange(3) < 1)), by("quality"), mesh)


def test_shaping_adds_the_penalty_to_the_score_but_not_to_acc(mesh):
    groups = experience([[1, 1], [0, 0], [0, 1]], lengths=[[2, 4], [3, 3], [1, 4]])
    buffer = OverlongBufferConfig(enable=True, len=2, penalty_factor=1.0)
    shaped = add_rewards(groups, buffer, LengthRewardConfig(), max_response_length=4, mesh=mesh)
    np.testing.assert_allclose(shaped.scores["seq_reward"], [[1.0, 0.0], [-0.5, -0.5], [0.0, 0.0]])
    np.testing.assert_allclose(shaped.scores["overlong_reward"], [[0.0, -1.0], [-0.5, -0.5], [0.0, -1.0]])
    assert filter_groups(shaped, by("acc"), mesh).keep.tolist() == [False, False, True]
    assert filter_groups(shaped, by("seq_reward"), mesh).keep.tolist() == [True, False, False]


def test_dropped_groups_are_counted_by_kind(mesh):
    groups = experience([[2, 2], [0, 0], [0, 1], [0.5, 0.5], [-1, -1]])  # 2: a sum of rewards of turns
    found = filter_groups(groups, by("acc"), mesh)
    assert filtered_counts([found.verdicts, found.verdicts]) == {"all_correct": 2, "all_wrong": 4, "other": 2}
    assert filtered_counts([]) == {"all_correct": 0, "all_wrong": 0, "other": 0}


def test_dropped_groups_without_a_verdict_are_neither_right_nor_wrong(mesh):
    groups = experience([[1, 1], [0, 0], [0, 1]])
    unjudged = dataclasses.replace(groups, scores={"score": groups.scores["score"]})
    judged_round, unjudged_round = filter_groups(groups, by("acc"), mesh), filter_groups(unjudged, by("score"), mesh)
    assert filtered_counts([unjudged_round.verdicts]) == {"all_correct": 0, "all_wrong": 0, "other": 2}
    both = filtered_counts([unjudged_round.verdicts, judged_round.verdicts])
    assert both == {"all_correct": 1, "all_wrong": 1, "other": 2}


def test_without_a_filter_all_groups_are_kept(mesh):
    assert filter_groups(experience([[0, 0], [1, 1]]), FilterGroupsConfig(enable=False), mesh).keep.all()
