import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.config.sections import LengthRewardConfig
from dapo_jax.rewards.shaping import (
    group_length_reward,
    length_rewards,
    place_rewards,
    shape_rewards,
    soft_overlong_penalty,
)


def test_the_penalty_follows_the_paper():
    lengths = jnp.array([1, 16384, 18432, 20480])
    penalty = soft_overlong_penalty(lengths, 20480, 4096, 1.0)
    np.testing.assert_allclose(penalty, [0.0, 0.0, -0.5, -1.0])
    np.testing.assert_allclose(soft_overlong_penalty(lengths, 20480, 4096, 0.5), [0.0, 0.0, -0.25, -0.5])


def test_the_reward_is_the_score_and_the_penalty_if_there_is_a_buffer():
    scores, lengths = jnp.array([1.0, -1.0, 1.0, 1.0]), jnp.array([1, 5, 8, 0])
    rewards, penalty = shape_rewards(scores, lengths, max_response_length=8, buffer_length=4, penalty_factor=1.0)
    np.testing.assert_allclose(rewards, [1.0, -1.25, 0.0, 1.0])
    np.testing.assert_allclose(penalty, [0.0, -0.25, -1.0, 0.0])
    rewards, penalty = shape_rewards(scores, lengths, max_response_length=8)
    assert rewards.tolist() == scores.tolist() and not penalty.any()


def test_a_reward_is_placed_at_the_last_token_and_nowhere_for_an_empty_response():
    mask = jnp.arange(4) < jnp.array([[1], [3], [4], [0]])
    placed = place_rewards(jnp.array([2.0, -1.5, 0.5, 7.0]), mask)
    np.testing.assert_array_equal(placed, [[2, 0, 0, 0], [0, 0, -1.5, 0], [0, 0, 0, 0.5], [0, 0, 0, 0]])


def test_the_group_form_is_that_of_kimi_in_any_unit_of_length():
    lengths = np.array([[100, 200, 300, 500], [7, 7, 7, 7], [0, 4, 0, 4], [100, 200, 300, 500], [3, 9, 4, 1]])
    right = np.array([[1, 0, 1, 0], [1, 0, 1, 1], [0, 0, 0, 0], [0, 1, 0, 1], [1, 1, 0, 1]], bool)
    group = jax.jit(group_length_reward)
    found = group(lengths, right)
    expected = [[0.5, 0.0, 0.0, -0.5], [0, 0, 0, 0], [0, -0.5, 0, -0.5], [0.0, 0.25, 0.0, -0.5]]
    np.testing.assert_allclose(found[:4], expected, atol=1e-7)
    np.testing.assert_allclose(found, group(lengths * 7 + 5, right), atol=1e-6)


def test_the_cosine_form_goes_from_one_bound_to_the_other():
    settings = LengthRewardConfig(
        form="cosine", right_short=2, right_long=1, wrong_short=-10, wrong_long=0, at_limit=-9
    )
    lengths, right = jnp.array([[0, 50, 99, 100], [0, 50, 25, 100]]), jnp.array([[True] * 4, [False] * 4])
    found = length_rewards(lengths, right, max_response_length=100, settings=settings)
    quarter = -10 * (1 + np.cos(np.pi / 4)) / 2
    np.testing.assert_allclose(found[0], [2.0, 1.5, 1.0, -9.0], atol=1e-3)
    np.testing.assert_allclose(found[1], [-10.0, -5.0, quarter, -9.0], atol=1e-5)


@pytest.mark.parametrize("form", ["group", "cosine"])
def test_a_weight_multiplies_the_length_reward(form):
    lengths, right = jnp.array([[3, 9, 4, 1]]), jnp.array([[True, True, False, True]])
    once, twice = (
        length_rewards(lengths, right, max_response_length=16, settings=LengthRewardConfig(form=form, weight=weight))
        for weight in (1.0, -2.0)
    )
    assert np.ptp(once) > 0
    np.testing.assert_allclose(twice, -2 * once)
