import jax.numpy as jnp
import numpy as np

from dapo_jax.rewards.shaping import place_rewards, shape_rewards, soft_overlong_penalty


def test_the_penalty_follows_the_paper():
    lengths = jnp.array([1, 16384, 18432, 20480])
    penalty = soft_overlong_penalty(lengths, 20480, 4096, 1.0)
    np.testing.assert_allclose(penalty, [0.0, 0.0, -0.5, -1.0])
    np.testing.assert_allclose(soft_overlong_penalty(lengths, 20480, 4096, 0.5), [0.0, 0.0, -0.25, -0.5])


def test_the_reward_is_the_score_and_the_penalty():
    scores, lengths = jnp.array([1.0, -1.0, 1.0, 1.0]), jnp.array([1, 5, 8, 0])
    rewards, penalty = shape_rewards(scores, lengths, max_response_length=8, buffer_length=4, penalty_factor=1.0)
    np.testing.assert_allclose(rewards, [1.0, -1.25, 0.0, 1.0])
    np.testing.assert_allclose(penalty, [0.0, -0.25, -1.0, 0.0])


def test_without_a_buffer_the_reward_is_the_score():
    rewards, penalty = shape_rewards(jnp.array([0.5]), jnp.array([4]), max_response_length=4)
    assert (rewards.tolist(), penalty.tolist()) == ([0.5], [0.0])


def test_a_reward_is_placed_at_the_last_token_and_nowhere_for_an_empty_response():
    mask = jnp.arange(4) < jnp.array([[1], [3], [4], [0]])
    placed = place_rewards(jnp.array([2.0, -1.5, 0.5, 7.0]), mask)
    np.testing.assert_array_equal(placed, [[2, 0, 0, 0], [0, 0, -1.5, 0], [0, 0, 0, 0.5], [0, 0, 0, 0]])
