import functools
import inspect
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from dapo_jax.algorithms.aggregation import MODES, token_weights, weighted_sum
from dapo_jax.algorithms.policy_loss import LOSSES
from dapo_jax.algorithms.ratios import off_policy_sequences
from dapo_jax.algorithms.token_selection import SELECTIONS
from dapo_jax.config import Config

CASES = json.loads((Path(__file__).parent / "data" / "policy_losses.json").read_text())
REFERENCE = {  # the losses that verl has
    *("vanilla", "dppo_tv", "dppo_kl", "gspo", "gpg", "cispo", "sapo", "geo_mean", "clip_cov", "kl_cov", "dro"),
}
OPTIONS = {  # a new option has its default here
    **{name: value for name, value in vars(Config().actor.policy_loss).items() if isinstance(value, float)},
    **{"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 10.0, "tau_pos": 1.0, "tau_neg": 1.05},
    **{"ppo_kl_coef": 0.1, "clip_cov_ratio": 0.2, "clip_cov_lb": -1e9, "clip_cov_ub": 1e9, "kl_cov_ratio": 0.2},
}
SHAPE = (6, 8)  # of the reference; the other tests have it too, so that each loss is compiled once
ONES = np.ones(SHAPE, np.float32)
jit_token_weights = jax.jit(token_weights, static_argnames="mode")


def call(function, *arrays, **options):
    """`function` with those of `options` that it asks for."""
    wanted = inspect.signature(function).parameters
    return function(*arrays, **{name: value for name, value in options.items() if name in wanted})


@functools.partial(jax.jit, static_argnames="mode")
def evaluated(mode, logprobs, old_logprobs, advantages, mask, weights, importance_weights, selected, options):
    """The loss; that of each token, metrics; the gradients by log-probabilities and advantages."""
    own_weights = "importance_weights" in inspect.signature(LOSSES[mode]).parameters

    def total(logprobs, advantages):
        more = {"selected": selected, "importance_weights": importance_weights, **options}
        loss, metrics = call(LOSSES[mode], logprobs, old_logprobs, advantages, mask, **more)
        loss = loss if own_weights else loss * importance_weights
        return weighted_sum(loss, weights, mask), (loss, metrics)

    (value, more), gradients = jax.value_and_grad(total, (0, 1), has_aux=True)(logprobs, advantages)
    return value, more, gradients


@functools.partial(jax.jit, static_argnames="mode")
def selection(mode, logprobs, old_logprobs, advantages, mask, options):
    noise = jax.random.uniform(jax.random.key(0), mask.shape)
    return call(SELECTIONS[mode], logprobs, old_logprobs, advantages, mask, noise, **options)


def evaluate(mode, logprobs, old_logprobs, advantages, mask=ONES > 0, *, weights=ONES, selected=None, **changes):
    """`evaluated`, with nothing selected unless `selected` says it; numbers stand for arrays of them."""
    importance_weights, options = changes.pop("importance_weights", None), {**OPTIONS, **changes}
    importance_weights = np.ones(np.shape(mask), np.float32) if importance_weights is None else importance_weights
    arrays = [np.broadcast_to(np.float32(x), mask.shape) for x in (logprobs, old_logprobs, advantages)]
    selected = np.zeros(mask.shape, bool) if selected is None else selected
    return evaluated(mode, *arrays, mask, weights, importance_weights, selected, options)


def select(mode, *arrays, **changes):
    """The selection from all rows; nothing, for a loss that has none."""
    return selection(mode, *arrays, {**OPTIONS, **changes}) if mode in SELECTIONS else None


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['name']}-{case['params']['loss_agg_mode']}")
def test_loss_gradient_and_metrics_equal_the_reference(case):
    mode, inputs = case["name"], {name: np.array(value, np.float32) for name, value in case["inputs"].items()}
    mask, importance_weights = inputs["response_mask"] > 0, case["inputs"]["rollout_is_weights"]
    options = {name: value for name, value in case["params"].items() if name in OPTIONS}
    arrays = inputs["log_prob"], inputs["old_log_prob"], inputs["advantages"], mask
    weights = jit_token_weights(mask, np.arange(len(mask)), case["params"]["loss_agg_mode"], scale_factor=8.0)
    if importance_weights is not None:
        options["importance_weights"] = inputs["rollout_is_weights"]
    found = evaluate(mode, *arrays, weights=weights, selected=select(mode, *arrays, **options), **options)
    loss, (_, metrics), (gradient, _) = found
    np.testing.assert_allclose(loss, case["expected"]["loss"], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(gradient, case["expected"]["grad"], rtol=1e-5, atol=1e-5)
    for name, value in case["expected"]["metrics"].items():
        name = name.removeprefix("actor/")
        if name not in metrics and mode != "kl_cov":
            assert name.startswith("pg_clipfrac") and value == 0  # the reference reports a constant
            continue
        mean = metrics["ppo_kl_abs" if mode == "kl_cov" else name]
        np.testing.assert_allclose(float(mean.total) / float(mean.count), value, rtol=1e-5, atol=1e-5)


def test_each_loss_of_the_reference_is_compared_with_it():
    assert {case["name"] for case in CASES} == REFERENCE <= set(LOSSES)


def batch(seed):
    rng = np.random.default_rng(seed)
    mask = np.arange(8) < rng.integers(0, 9, (6, 1))
    old = rng.normal(-1.0, 0.5, SHAPE).astype(np.float32)
    logprobs = old + rng.normal(0.0, 0.3, SHAPE).astype(np.float32)
    return logprobs, old, np.float32(rng.normal(size=(6, 1))) * ONES, mask


@pytest.mark.parametrize("mode", LOSSES)
def test_loss_and_gradient_do_not_depend_on_the_micro_batches(mode):
    arrays = batch(0)
    mask, selected = arrays[-1], select(mode, *arrays)
    assert selected is None or 0 < selected.sum() < mask.sum()
    selected = np.zeros_like(mask) if selected is None else selected
    for aggregation in MODES:
        weights = np.asarray(jit_token_weights(mask, np.repeat([0, 1], 3), aggregation, scale_factor=8.0))

        def part(rows, weights=weights):
            loss, _, (gradient, _) = evaluate(
                mode, *(x[rows] for x in arrays), weights=weights[rows], selected=selected[rows]
            )
            return loss, gradient

        whole, gradient = part(slice(0, 6))
        pieces = [part(slice(first, first + 2)) for first in (0, 2, 4)]
        np.testing.assert_allclose(sum(piece for piece, _ in pieces), whole, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(np.concatenate([piece for _, piece in pieces]), gradient, rtol=1e-5, atol=1e-7)
        assert np.abs(gradient).max() > 1e-3


@pytest.mark.parametrize("mode", LOSSES)
def test_what_is_masked_does_not_leak_even_if_it_is_not_a_number(mode):
    *arrays, mask = batch(1)
    assert not mask.all() and not mask.any(axis=1).all()  # with an empty row
    weights = jit_token_weights(mask, np.arange(6), "token-mean", scale_factor=8.0)
    bad = [np.where(mask, x, np.nan) for x in arrays]
    (expected, (_, expected_metrics), (expected_gradient, _)), (loss, (_, metrics), (gradient, _)) = (
        evaluate(mode, *given, mask, weights=weights, selected=select(mode, *given, mask)) for given in (arrays, bad)
    )
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    np.testing.assert_allclose(np.where(mask, gradient, 0), np.where(mask, expected_gradient, 0), rtol=1e-5)
    for name, mean in metrics.items():
        np.testing.assert_allclose(mean.total, expected_metrics[name].total, rtol=1e-5)


@pytest.mark.parametrize("mode", LOSSES)
def test_an_advantage_carries_no_gradient_and_without_one_there_is_none(mode):
    logprobs, old, advantages, mask = batch(2)
    _, _, (_, to_advantages) = evaluate(mode, logprobs, old, advantages, mask)
    assert not to_advantages.any()
    _, _, (gradient, _) = evaluate(mode, logprobs, old, 0.0, mask)
    assert (gradient == 0).all() or mode == "dro"


@pytest.mark.parametrize("mode", LOSSES)
def test_a_step_against_the_gradient_favours_the_better_tokens(mode):
    """On policy, every loss has the policy gradient's direction: up for a good response, down for a bad one."""
    logprobs = np.resize([[-1.0, -2.0], [-1.5, -0.5]], SHAPE)
    advantages = np.resize([[1.0], [-1.0]], (6, 1))
    _, _, (gradient, _) = evaluate(mode, logprobs, logprobs, advantages)
    assert (gradient * advantages < 0).all()


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
    _, _, (gradient, _) = evaluate(mode, np.log(new), np.log(old), advantage)
    np.testing.assert_allclose(gradient, -advantage * min(new / old, 10.0) * trains * ONES, rtol=1e-5)


@pytest.mark.parametrize("packed", [False, True])
def test_bad_sequences_that_drifted_are_left_out(packed):
    """Means of old - new: 0.3 and 0.1 nats; the token outside of the mask does not count."""
    old = -np.ones((2, 3), np.float32)
    logprobs = old - np.array([[0.2, 0.4, 9.0], [0.1, 0.1, 0.1]], np.float32)
    mask, sequences = np.array([[True, True, False], [True, True, True]]), None
    expected = np.array([[True, True, False], [False, False, False]])
    if packed:
        old, logprobs, mask, expected = (x.reshape(1, 6) for x in (old, logprobs, mask, expected))
        sequences = np.array([[0, 0, 0, 1, 1, 1]])
    found = jax.jit(off_policy_sequences)
    for sign in (1, -1):
        left_out = found(logprobs, old, -sign * np.ones_like(old), mask, threshold=0.2, sequences=sequences)
        np.testing.assert_array_equal(left_out, expected & (sign == 1))


def token(ratio, advantage, **changes):
    """Loss and gradient with respect to the ratio's logarithm, for one token."""
    _, (losses, _), (gradient, _) = evaluate("vanilla", np.log(np.float32(ratio)), 0.0, advantage, **changes)
    return float(losses[0, 0]), float(gradient[0, 0])


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        *((2.0, 1.0, -1.28, 0.0), (0.5, 1.0, -0.5, -0.5)),  # a good token is clipped above only
        *((0.5, -1.0, 0.8, 0.0), (2.0, -1.0, 2.0, 2.0)),  # a bad one below only
        *((30.0, -1.0, 10.0, 0.0), (30.0, 1.0, -1.28, 0.0)),  # the dual clip bounds bad tokens only
    ],
)
def test_the_ratio_of_a_token_is_clipped(ratio, advantage, loss, gradient):
    np.testing.assert_allclose(token(ratio, advantage), (loss, gradient), atol=1e-6 if ratio < 30 else 1e-5)


def test_clip_higher_leaves_room_for_unlikely_tokens():
    """The paper's example: with 0.2 a probability of 0.01 may rise to 0.012, with 0.28 to 0.0128."""
    for clip, highest in ((0.2, 0.012), (0.28, 0.0128)):
        assert token(highest / 0.01 - 1e-4, 1.0, clip_ratio_high=clip)[1] != 0
        assert token(highest / 0.01 + 1e-4, 1.0, clip_ratio_high=clip)[1] == 0


def test_the_log_ratio_is_clamped_at_20():
    np.testing.assert_allclose(token(1e30, -1.0, clip_ratio_c=1e12), (np.exp(20), 0.0), rtol=1e-5)
    np.testing.assert_allclose(token(1e-30, -1.0, clip_ratio_low=1.0), (np.exp(-20), 0.0), rtol=1e-5)


def test_a_selected_token_loses_its_gradient_or_pays():
    selected = np.arange(8) < np.array([[4]] * 6)
    for mode, expected in (("clip_cov", [0.0, -np.exp(0.1)]), ("kl_cov", [-np.exp(0.1) + 0.1, -np.exp(0.1)])):
        _, _, (gradient, _) = evaluate(mode, 0.1, 0.0, 1.0, selected=selected)
        np.testing.assert_allclose(gradient, np.where(selected, *expected), rtol=1e-6)
    rounding = np.where(selected & (np.arange(8) % 2 > 0), 1e-6, -1e-6)  # of a policy that is the old one but for it
    _, _, (gradient, _) = evaluate("kl_cov", rounding, 0.0, 1.0, selected=selected)
    np.testing.assert_allclose(gradient, -ONES, atol=1e-5)
