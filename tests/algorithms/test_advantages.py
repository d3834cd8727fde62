import functools
import itertools
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from dapo_jax.algorithms.advantages import ESTIMATORS, cpo, grpo
from dapo_jax.algorithms.arguments import required
from dapo_jax.algorithms.cpo import CPO_METHODS
from dapo_jax.algorithms.group_relative import whiten

CASES = json.loads((Path(__file__).parent / "data" / "advantages.json").read_text())
REFERENCE = {  # the estimators that verl has, by our names
    *("grpo", "grpo_passk", "rloo", "opo", "gpg", "gdpo", "optimal_token_baseline"),
    *("reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "gae"),
}
ARRAYS = {"values", "reward_baselines", "reward_parts", "logprobs", "sum_pi_squared", "importance_weights"}
REQUIRED = {name: required(function) for name, function in ESTIMATORS.items()}
GROUPED = [name for name, required in REQUIRED.items() if "num_groups" in required]
SCORES_ALONE = sorted(
    name for name, required in REQUIRED.items() if required == {"rewards", "mask", "group_ids", "num_groups"}
)


SHAPE, NUM_GROUPS = (16, 7), 4  # of most references; tests are padded to it, so that an estimator is compiled once


@functools.partial(
    jax.jit,
    static_argnames=("name", "num_groups", "norm_adv_by_std_in_grpo", "wrap_method", "vocab_size", "cpo_lambda"),
)
def estimate(name, rewards, mask, group_ids, **options):
    return ESTIMATORS[name](rewards, mask, group_ids, **options)


def padded(array, value=np.nan, shape=SHAPE):
    missing = [(0, whole - part) for whole, part in zip(shape, np.shape(array), strict=False)]
    return np.pad(array, missing, constant_values=value)


def run(name, scores, group_ids, *, tokens=3, **options):
    """Advantage of each response's first token; its last token has the score."""
    rewards = np.zeros((len(scores), tokens), np.float32)
    rewards[:, -1] = scores
    arrays = padded(rewards), padded(np.ones(rewards.shape, bool), False), padded(np.array(group_ids), NUM_GROUPS)
    values, _ = estimate(name, *arrays, num_groups=NUM_GROUPS, **options)
    return np.asarray(values)[: len(scores), 0]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_advantages_and_returns_equal_the_reference(case):
    inputs, options = case["inputs"], dict(case["params"])
    mask = np.array(inputs["response_mask"]) > 0
    names, group_ids = np.unique(inputs.get("group_ids", [0] * len(mask)), return_inverse=True)
    options |= {name: np.array(inputs[name], np.float32) for name in ARRAYS & set(inputs)}
    if case["name"] in GROUPED:
        options["num_groups"] = len(names)
    found = estimate(case["name"], np.array(inputs["token_level_rewards"], np.float32), mask, group_ids, **options)
    for values, name in zip(found, ("advantages", "returns"), strict=True):
        np.testing.assert_allclose(np.where(mask, values, 0), np.where(mask, case["expected"][name], 0), atol=1e-5)


def test_each_estimator_of_the_reference_is_compared_with_it():
    assert {case["name"] for case in CASES} == REFERENCE <= set(ESTIMATORS)


@pytest.mark.parametrize(("count", "value"), [(12, 0.1), (7, 0.7), (8, 0.1), (3, -1.3)])
def test_equal_scores_give_exactly_zero(count, value):
    for name, norm in itertools.product(("grpo", "dapo", "grpo_passk"), (True, False)):
        assert (run(name, [value] * count, [0] * count, norm_adv_by_std_in_grpo=norm) == 0).all()
    for name in ("rloo", "opo", "gpg"):
        assert (run(name, [value] * count, [0] * count) == 0).all()


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "gpg"])
def test_a_single_response_gets_its_score(name):
    np.testing.assert_allclose(run(name, [2.0, 1.0, 0.5], [0, 1, 1])[0], 2.0, rtol=1e-5)


def test_the_best_response_has_its_lead_over_the_second_unless_it_is_alone_or_tied():
    advantages = run("grpo_passk", [0.0, 3.0, 2.0], [0, 0, 0], norm_adv_by_std_in_grpo=False)
    np.testing.assert_array_equal(advantages, [0, 1, 0])
    np.testing.assert_array_equal(run("grpo_passk", [2.0, 1.0, 1.0], [0, 1, 1]), 0)


@pytest.mark.parametrize("name", SCORES_ALONE)
def test_the_order_of_rows_does_not_matter(name):
    scores, groups = np.random.default_rng(0).normal(size=12), np.repeat(np.arange(3), 4)
    order = np.random.default_rng(1).permutation(12)
    np.testing.assert_allclose(run(name, scores[order], groups[order]), run(name, scores, groups)[order], atol=1e-6)


@pytest.mark.parametrize("name", SCORES_ALONE)
def test_rows_and_tokens_of_padding_and_empty_groups_change_nothing(name):
    rng = np.random.default_rng(2)
    rewards, mask, groups = rng.normal(size=(6, 4)), np.arange(4) < rng.integers(1, 5, (6, 1)), np.repeat([0, 1], 3)
    found = estimate(name, rewards * mask, mask, groups, num_groups=2)
    arrays = padded(rewards * mask), padded(mask, False), padded(groups, NUM_GROUPS)
    more = [np.asarray(values) for values in estimate(name, *arrays, num_groups=NUM_GROUPS)]
    for values, padded_values in zip(found, more, strict=True):
        np.testing.assert_allclose(padded_values[:6, :4], values, rtol=1e-5, atol=1e-6)
    assert (more[0][:6, 4:] == 0).all() and (more[0][6:] == 0).all()


def test_values_that_are_nearly_equal_are_whitened_as_exactly_as_others():
    """Their mean is rounded by about as much as they differ, on each mesh by another amount."""
    dice = np.random.default_rng(0)
    values, mask = (dice.normal(size=(64, 31)) * 1e-3 - 1.5).astype(np.float32), dice.random((64, 31)) < 0.9
    of_mask = values[mask].astype(np.float64)
    expected = (of_mask - of_mask.mean()) / np.sqrt(of_mask.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(np.asarray(whiten(values, mask))[mask], expected, atol=2e-6)
    np.testing.assert_allclose(whiten(np.full_like(values, -1.5001), mask), 0, atol=1e-6)


def test_maxrl_weighs_a_right_answer_by_how_rare_it_is():
    """(1 - p) / p for right answers, -1 for wrong ones; nothing without a right answer, or without a wrong one."""
    scores = np.array([1, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1, 1.0])
    groups = np.repeat([0, 1, 2, 3], 4)
    expected = [3, -1, -1, -1, 1 / 3, 1 / 3, 1 / 3, -1, 0, 0, 0, 0, 0, 0, 0, 0]
    np.testing.assert_allclose(run("maxrl", scores, groups, accuracy=scores), expected, atol=1e-6)
    penalised = run("maxrl", scores - 0.5 * np.eye(16)[1], groups, accuracy=scores)
    np.testing.assert_allclose(penalised[:4], (np.array([1, -0.5, 0, 0]) - 0.125) / 0.25, atol=1e-6)


def test_gdpo_counts_each_reward_alike_whatever_its_scale():
    rng, groups = np.random.default_rng(0), np.repeat([0, 1, 2], 4)
    parts = rng.normal(size=(12, 2))

    def of_parts(parts, *weights):
        parts = padded(np.float32(parts), shape=(16, 2))
        return run("gdpo", np.zeros(12), groups, reward_parts=parts, gdpo_reward_weights=list(weights))

    np.testing.assert_allclose(of_parts(parts, 1.0, 0.5), of_parts(parts * [1.0, 100.0], 1.0, 0.5), atol=1e-4)
    alone = of_parts(parts, 1.0, 0.0)
    scores = run("grpo", np.float32(parts[:, 0]), groups)
    np.testing.assert_allclose(alone, (scores - scores.mean()) / np.repeat(scores, 3).std(ddof=1), atol=1e-4)


def test_the_optimal_baseline_is_the_mean_where_all_tokens_are_as_sure():
    """And a token that only one response has keeps its reward to go; a sure token weighs nothing."""
    mask = np.arange(4) < np.array([[2], [3], [4]])
    rewards = np.zeros((3, 4))
    rewards[[0, 1, 2], [1, 2, 3]] = [1.0, 0.0, 4.0]
    arrays = padded(rewards), padded(mask, False), padded(np.zeros(3, int), NUM_GROUPS)

    def estimated(*sure):
        """Advantages, with rows of whose tokens the policy is sure."""
        logprobs, squares = np.full((3, 4), np.log(0.5)), np.full((3, 4), 0.5)
        logprobs[list(sure)], squares[list(sure)] = 0.0, 1.0
        more = {"logprobs": padded(logprobs), "sum_pi_squared": padded(squares)}
        return estimate("optimal_token_baseline", *arrays, num_groups=NUM_GROUPS, **more)[0][:3, :4]

    expected = [[1 - 5 / 3] * 2 + [0, 0], [-5 / 3] * 2 + [-2, 0], [4 - 5 / 3] * 2 + [2, 4]]
    np.testing.assert_allclose(estimated(), expected, atol=1e-6)
    expected = [[0.5] * 2 + [0, 0], [-0.5] * 2 + [0, 0], [3.5] * 2 + [4, 4]]
    np.testing.assert_allclose(estimated(2), expected, atol=1e-6)


def test_the_optimal_baseline_lowers_the_variance_of_the_gradient():
    """Of one softmax that all tokens share; the group's mean is the other baseline."""
    rng, groups, size, tokens, words = np.random.default_rng(0), 4000, 4, 3, 3
    logits = np.array([[2.0, 0.0, -1.0], [0.0, 0.5, 0.0], [3.0, 0.0, 0.0]])
    pi = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    drawn = np.stack([rng.choice(words, size=(groups, size), p=row) for row in pi], axis=-1).reshape(-1, tokens)
    mask, ids = np.ones(drawn.shape, bool), np.repeat(np.arange(groups), size)
    rewards = np.zeros(drawn.shape) + np.where(np.arange(tokens) == tokens - 1, (drawn == 0).all(-1)[:, None], 0)
    scores = np.eye(words)[drawn] - pi  # the gradient of a token's log-probability by its logits
    arrays = {
        "logprobs": np.log(pi[np.arange(tokens), drawn]),
        "sum_pi_squared": np.tile((pi**2).sum(-1), (len(ids), 1)),
    }

    def variance(name, **arrays):
        advantages, _ = estimate(name, rewards, mask, ids, num_groups=groups, **arrays)
        gradients = (np.asarray(advantages)[..., None] * scores).reshape(groups, size, tokens, words).mean(axis=1)
        return gradients.var(axis=0).sum()

    assert variance("optimal_token_baseline", **arrays) < variance("grpo", norm_adv_by_std_in_grpo=False)


CPO = {
    **{"num_groups": 3, "norm_adv_by_std_in_grpo": True, "vocab_size": 10, "cpo_lambda": 2.0},
    **{"pos_alpha": 0.05, "neg_alpha": 0.2, "mi_alpha": 0.1, "kl_alpha": 0.3},
}


@functools.cache
def cpo_batch():
    """Rewards of groups of difficulty 1, 0 and -1, each of two responses; mask, groups, and what CPO needs besides."""
    rng = np.random.default_rng(0)
    rewards = np.zeros((6, 3), np.float32)
    rewards[:, 0] = [1.0, 0.5, 1.0, 0.0, 0.0, -1.0]
    mask = np.arange(3) < np.array([3, 2, 3, 1, 3, 3])[:, None]
    logprobs, hints = np.float32(-rng.exponential(size=(2, 6, 3)))
    more = {"logprobs": logprobs, "hint_logprobs": hints, "entropy": np.float32(rng.uniform(0, 2, size=(6, 3)))}
    return (rewards, mask, np.repeat([0, 1, 2], 2)), more


@functools.cache
def cpo_added():
    """What each method of CPO adds to GRPO's advantages."""
    arrays, more = cpo_batch()

    @jax.jit
    def added(arrays, more):
        base, _ = grpo(*arrays, num_groups=3)
        return {method: cpo(*arrays, wrap_method=method, **more, **CPO)[0] - base for method in CPO_METHODS}

    return added(arrays, more)


@pytest.mark.parametrize("method", CPO_METHODS)
def test_cpo_adds_what_its_method_says(method):
    (_, mask, _), more = cpo_batch()
    logprobs, hints, entropy = more.values()
    difficulty = np.array([1, 1, 0, 0, -1, -1])[:, None]
    kl = np.where(mask, np.exp(hints) * (hints - logprobs), 0)
    ratio, uncertainty = np.clip(np.exp(hints - logprobs), 0.5, 2.0), entropy / np.log(10)
    expected = {
        "mi": 0.1 * kl,
        "mi_clamp_unify_difficulty": np.choose(difficulty + 1, [0.2, 0.1, 0.05]) * ratio * kl,
        "negonly_mi3": (difficulty != 1) * 0.2 * ratio * kl * (1 - uncertainty),
        "seq_kl": 0.3 * kl.sum(axis=1, keepdims=True),
        "negonly_seq_kl": (difficulty != 1) * 0.3 * kl.sum(axis=1, keepdims=True),
    }[method]
    np.testing.assert_allclose(cpo_added()[method], expected * mask, atol=1e-6)


def test_an_unknown_cpo_method_is_refused():
    arrays, more = cpo_batch()
    with pytest.raises(ValueError, match="wrap_method='tok_kl' must be one of mi, "):
        jax.eval_shape(lambda *arrays: cpo(*arrays, wrap_method="tok_kl", **more, **CPO), *arrays)
