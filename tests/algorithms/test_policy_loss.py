import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.algorithms.aggregation import token_weights, weighted_sum
from dapo_jax.algorithms.policy_loss import vanilla

CASES = json.loads((Path(__file__).parent / "data" / "vanilla.json").read_text())
CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 10.0}


@pytest.mark.parametrize("case", CASES)
def test_loss_gradient_and_metrics_equal_the_reference(case):
    inputs = {name: jnp.array(value, jnp.float32) for name, value in case["inputs"].items()}
    mask = inputs["response_mask"] > 0
    clip = {name: case["params"][name] for name in CLIP}

    def loss_fn(logprobs):
        loss, metrics = vanilla(logprobs, inputs["old_log_prob"], inputs["advantages"], mask, **clip)
        weights = token_weights(
            mask,
            case["params"]["loss_agg_mode"],
            num_tokens=mask.sum(),
            num_sequences=(mask.sum(axis=1) > 0).sum(),
            scale_factor=mask.shape[1],
        )
        return weighted_sum(loss, weights, mask), metrics

    (loss, metrics), gradient = jax.value_and_grad(loss_fn, has_aux=True)(inputs["log_prob"])
    np.testing.assert_allclose(loss, case["expected"]["loss"], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(gradient, case["expected"]["grad"], rtol=1e-5, atol=1e-5)
    for name, mean in metrics.items():
        np.testing.assert_allclose(mean.total / mean.count, case["expected"]["metrics"][f"actor/{name}"], atol=1e-5)


def token(ratio, advantage, **changes):
    """Loss and gradient with respect to the ratio's logarithm, for one token."""

    def loss_fn(log_ratio):
        array = jnp.full((1, 1), log_ratio)
        loss, _ = vanilla(array, jnp.zeros((1, 1)), jnp.full((1, 1), advantage), jnp.ones((1, 1), bool),
                          **{**CLIP, **changes})  # fmt: skip
        return loss[0, 0]

    return tuple(float(value) for value in jax.value_and_grad(loss_fn)(jnp.log(ratio)))


def test_a_good_token_is_clipped_above_only():
    np.testing.assert_allclose(token(2.0, 1.0), (-1.28, 0.0), atol=1e-6)
    np.testing.assert_allclose(token(0.5, 1.0), (-0.5, -0.5), atol=1e-6)


def test_a_bad_token_is_clipped_below_only():
    np.testing.assert_allclose(token(0.5, -1.0), (0.8, 0.0), atol=1e-6)
    np.testing.assert_allclose(token(2.0, -1.0), (2.0, 2.0), atol=1e-6)


def test_the_dual_clip_bounds_bad_tokens_only():
    np.testing.assert_allclose(token(30.0, -1.0), (10.0, 0.0), atol=1e-5)
    np.testing.assert_allclose(token(30.0, 1.0), (-1.28, 0.0), atol=1e-5)


def test_clip_higher_leaves_room_for_unlikely_tokens():
    """The paper's example: with 0.2 a probability of 0.01 may rise to 0.012, with 0.28 to 0.0128."""
    for clip, highest in ((0.2, 0.012), (0.28, 0.0128)):
        assert token(highest / 0.01 - 1e-4, 1.0, clip_ratio_high=clip)[1] != 0
        assert token(highest / 0.01 + 1e-4, 1.0, clip_ratio_high=clip)[1] == 0


def test_the_log_ratio_is_clamped_at_20():
    np.testing.assert_allclose(token(jnp.float32(1e30), -1.0, clip_ratio_c=1e12), (np.exp(20), 0.0), rtol=1e-5)
    np.testing.assert_allclose(token(jnp.float32(1e-30), -1.0, clip_ratio_low=1.0), (np.exp(-20), 0.0), rtol=1e-5)


def test_the_advantage_carries_no_gradient():
    def loss_fn(advantage):
        ones = jnp.ones((1, 1))
        return vanilla(ones, ones, advantage * ones, ones > 0, **CLIP)[0].sum()

    assert jax.grad(loss_fn)(2.0) == 0
