import inspect
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.algorithms.aggregation import MODES, token_weights, weighted_sum
from dapo_jax.algorithms.policy_loss import LOSSES, dro, vanilla
from dapo_jax.algorithms.ratios import off_policy_sequences
from dapo_jax.algorithms.token_selection import SELECTIONS
from dapo_jax.config import Config

CASES = json.loads((Path(__file__).parent / "data" / "policy_losses.json").read_text())
REFERENCE = {  # the losses that verl has
    *("vanilla", "dppo_tv", "dppo_kl", "gspo", "gpg", "cispo", "sapo", "geo_mean", "clip_cov", "kl_cov", "dro"),
}
CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 10.0}
OPTIONS = {  # a new option has its default here
    **vars(Config().actor.policy_loss),
    **CLIP,
    "tau_pos": 1.0,
    "tau_neg": 1.05,
    "ppo_kl_coef": 0.1,
    "clip_cov_ratio": 0.2,
    "clip_cov_lb": -1e9,
    "clip_cov_ub": 1e9,
    "kl_cov_ratio": 0.2,
}


def call(function, *arrays, **options):
    """`function` with those of `options` that it asks for."""
    wanted = inspect.signature(function).parameters
    return function(*arrays, **{name: value for name, value in options.items() if name in wanted})


def token_losses(mode, logprobs, old_logprobs, advantages, mask, *, weights=None, selected=None, **options):
    """Loss of each token and metrics, with a selection from all rows unless one is given."""
    options = {**OPTIONS, **options}
    if mode in SELECTIONS and selected is None:
        noise = jax.random.uniform(jax.random.key(0), mask.shape)
        selected = call(
            SELECTIONS[mode], jax.lax.stop_gradient(logprobs), old_logprobs, advantages, mask, noise, **options
        )
    weights = jnp.ones_like(logprobs) if weights is None else weights
    own_weights = "importance_weights" in inspect.signature(LOSSES[mode]).parameters
    loss, metrics = call(
        LOSSES[mode], logprobs, old_logprobs, advantages, mask, selected=selected, importance_weights=weights, **options
    )
    return loss if own_weights else loss * weights, metrics


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['name']}-{case['params']['loss_agg_mode']}")
def test_loss_gradient_and_metrics_equal_the_reference(case):
    inputs = {name: value if value is None else jnp.array(value) for name, value in case["inputs"].items()}
    mask = inputs["response_mask"] > 0
    options = {name: value for name, value in case["params"].items() if name in OPTIONS}

    def loss_fn(logprobs):
        loss, metrics = token_losses(
            case["name"],
            logprobs,
            inputs["old_log_prob"],
            inputs["advantages"],
            mask,
            weights=inputs["rollout_is_weights"],
            **options,
        )
        weights = token_weights(
            mask, jnp.arange(len(mask)), case["params"]["loss_agg_mode"], scale_factor=mask.shape[1]
        )
        return weighted_sum(loss, weights, mask), metrics

    (loss, metrics), gradient = jax.value_and_grad(loss_fn, has_aux=True)(inputs["log_prob"])
    np.testing.assert_allclose(loss, case["expected"]["loss"], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(gradient, case["expected"]["grad"], rtol=1e-5, atol=1e-5)
    for name, value in case["expected"]["metrics"].items():
        name = name.removeprefix("actor/")
        if name not in metrics and case["name"] != "kl_cov":
            assert name.startswith("pg_clipfrac") and value == 0  # the reference reports a constant
            continue
        name = "ppo_kl_abs" if case["name"] == "kl_cov" else name
        np.testing.assert_allclose(metrics[name].total / metrics[name].count, value, rtol=1e-5, atol=1e-5)


def test_each_loss_of_the_reference_is_compared_with_it():
    assert {case["name"] for case in CASES} == REFERENCE <= set(LOSSES)


def batch(rng, rows=6, tokens=8):
    mask = jnp.arange(tokens) < jnp.array(rng.integers(0, tokens + 1, (rows, 1)))
    old = jnp.array(rng.normal(-1.0, 0.5, (rows, tokens)), jnp.float32)
    logprobs = old + jnp.array(rng.normal(0.0, 0.3, (rows, tokens)), jnp.float32)
    return logprobs, old, jnp.array(rng.normal(size=(rows, 1)), jnp.float32) * jnp.ones((rows, tokens)), mask


@pytest.mark.parametrize("aggregation", MODES)
@pytest.mark.parametrize("mode", LOSSES)
def test_loss_and_gradient_do_not_depend_on_the_micro_batches(mode, aggregation):
    logprobs, old, advantages, mask = batch(np.random.default_rng(0))
    weights = token_weights(mask, jnp.repeat(jnp.arange(2), 3), aggregation, scale_factor=8)
    noise = jax.random.uniform(jax.random.key(0), mask.shape)
    selected = jnp.zeros_like(mask)
    if mode in SELECTIONS:
        selected = call(SELECTIONS[mode], logprobs, old, advantages, mask, noise, **OPTIONS)
        assert 0 < selected.sum() < mask.sum()

    def loss_fn(logprobs, rows):
        loss, _ = token_losses(mode, logprobs, old[rows], advantages[rows], mask[rows], selected=selected[rows])
        return weighted_sum(loss, weights[rows], mask[rows])

    whole, gradient = jax.value_and_grad(loss_fn)(logprobs, slice(0, 6))
    pieces = [jax.value_and_grad(loss_fn)(logprobs[rows], rows) for rows in (slice(0, 1), slice(1, 5), slice(5, 6))]
    np.testing.assert_allclose(sum(piece for piece, _ in pieces), whole, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.concatenate([piece for _, piece in pieces]), gradient, rtol=1e-5, atol=1e-7)
    assert np.abs(gradient).max() > 1e-3


@pytest.mark.parametrize("mode", LOSSES)
def test_what_is_masked_does_not_leak_even_if_it_is_not_a_number(mode):
    logprobs, old, advantages, mask = batch(np.random.default_rng(1))
    assert not mask.all() and not mask.any(axis=1).all()  # with an empty row
    bad = [jnp.where(mask, x, jnp.nan) for x in (logprobs, old, advantages)]

    def loss_fn(logprobs, old, advantages):
        loss, metrics = token_losses(mode, logprobs, old, advantages, mask)
        weights = token_weights(mask, jnp.arange(6), "token-mean")
        return weighted_sum(loss, weights, mask), metrics

    (expected, expected_metrics), expected_gradient = jax.value_and_grad(loss_fn, has_aux=True)(
        logprobs, old, advantages
    )
    (loss, metrics), gradient = jax.value_and_grad(loss_fn, has_aux=True)(*bad)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    np.testing.assert_allclose(jnp.where(mask, gradient, 0), jnp.where(mask, expected_gradient, 0), rtol=1e-5)
    for name, mean in metrics.items():
        np.testing.assert_allclose(mean.total, expected_metrics[name].total, rtol=1e-5)


@pytest.mark.parametrize("mode", sorted(LOSSES.keys() - {"dro"}))
def test_without_an_advantage_there_is_no_gradient(mode):
    logprobs, old, _, mask = batch(np.random.default_rng(2))

    def loss_fn(logprobs):
        loss, _ = token_losses(mode, logprobs, old, jnp.zeros_like(old), mask, selected=jnp.zeros_like(mask))
        return jnp.sum(loss, where=mask)

    assert (jax.grad(loss_fn)(logprobs) == 0).all()


@pytest.mark.parametrize("mode", LOSSES)
def test_a_step_against_the_gradient_favours_the_better_tokens(mode):
    """On policy, every loss has the policy gradient's direction: up for a good response, down for a bad one."""
    logprobs = jnp.array([[-1.0, -2.0], [-1.5, -0.5]])
    advantages = jnp.array([[1.0, 1.0], [-1.0, -1.0]])
    mask = jnp.ones((2, 2), bool)

    def loss_fn(x):
        loss, _ = token_losses(mode, x, logprobs, advantages, mask, selected=jnp.zeros_like(mask))
        return loss.sum()

    gradient = jax.grad(loss_fn)(logprobs)
    assert (gradient[0] < 0).all() and (gradient[1] > 0).all()


def test_dro_pulls_every_token_back_to_the_old_policy():
    logprobs, old, advantages, mask = batch(np.random.default_rng(3))
    gradient = jax.grad(lambda x: jnp.sum(dro(x, old, advantages, mask, dro_beta=0.4)[0], where=mask))(logprobs)
    np.testing.assert_allclose(gradient, jnp.where(mask, 0.4 * (logprobs - old) - advantages, 0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("mode", "old", "new", "advantage", "trains"),
    [  # thresholds 0.2 and 0.28
        ("dppo_tv", 0.01, 0.1, 1.0, True),  # ten times as likely, and yet near: a ratio's clip would stop it
        ("dppo_tv", 0.5, 0.77, 1.0, True),
        ("dppo_tv", 0.5, 0.79, 1.0, False),
        ("dppo_tv", 0.5, 0.31, -1.0, True),
        ("dppo_tv", 0.5, 0.29, -1.0, False),
        ("dppo_tv", 0.5, 0.29, 1.0, True),  # it comes back
        ("dppo_kl", 0.5, 0.8, 1.0, True),  # 0.5 log(0.5 / 0.8) + 0.5 log(0.5 / 0.2) = 0.22
        ("dppo_kl", 0.5, 0.85, 1.0, False),  # 0.34
        ("dppo_kl", 0.5, 0.2, -1.0, False),  # 0.22
        ("dppo_kl", 0.5, 0.85, -1.0, True),
    ],
)
def test_dppo_stops_where_the_probability_has_moved_too_far(mode, old, new, advantage, trains):
    logprobs, before = jnp.log(jnp.full((1, 1), new)), jnp.log(jnp.full((1, 1), old))
    arrays = before, jnp.full((1, 1), advantage), jnp.ones((1, 1), bool)
    gradient = jax.grad(lambda x: call(LOSSES[mode], x, *arrays, **CLIP)[0].sum())(logprobs)
    np.testing.assert_allclose(gradient, -advantage * min(new / old, 10.0) if trains else 0.0, rtol=1e-5)


@pytest.mark.parametrize("packed", [False, True])
def test_bad_sequences_that_drifted_are_left_out(packed):
    """Means of old - new: 0.3 and 0.1 nats; the token outside of the mask does not count."""
    old = jnp.array([[-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0]])
    logprobs = old - jnp.array([[0.2, 0.4, 9.0], [0.1, 0.1, 0.1]])
    mask, sequences = jnp.array([[True, True, False], [True, True, True]]), None
    advantages = -jnp.ones_like(old)
    expected = np.array([[True, True, False], [False, False, False]])
    if packed:
        old, logprobs, mask, advantages = (x.reshape(1, 6) for x in (old, logprobs, mask, advantages))
        sequences, expected = jnp.array([[0, 0, 0, 1, 1, 1]]), expected.reshape(1, 6)
    for sign in (1, -1):
        left_out = off_policy_sequences(logprobs, old, sign * advantages, mask, threshold=0.2, sequences=sequences)
        np.testing.assert_array_equal(left_out, expected & (sign == 1))


def token(ratio, advantage, **changes):
    """Loss and gradient with respect to the ratio's logarithm, for one token."""

    def loss_fn(log_ratio):
        array = jnp.full((1, 1), log_ratio)
        loss, _ = vanilla(
            array, jnp.zeros((1, 1)), jnp.full((1, 1), advantage), jnp.ones((1, 1), bool), **{**CLIP, **changes}
        )
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


def test_a_selected_token_loses_its_gradient_or_pays():
    logprobs, old = jnp.array([[0.1, 0.1]]), jnp.zeros((1, 2))
    selected, mask = jnp.array([[True, False]]), jnp.ones((1, 2), bool)
    for mode, expected in (("clip_cov", [0.0, -np.exp(0.1)]), ("kl_cov", [-np.exp(0.1) + 0.1, -np.exp(0.1)])):

        def loss_fn(x, mode=mode):
            return token_losses(mode, x, old, jnp.ones((1, 2)), mask, selected=selected)[0].sum()

        np.testing.assert_allclose(jax.grad(loss_fn)(logprobs), [expected], rtol=1e-6)
        if mode == "kl_cov":  # of a policy that is the old one but for rounding
            np.testing.assert_allclose(jax.grad(loss_fn)(jnp.array([[1e-6, -1e-6]])), [[-1, -1]], atol=1e-5)
