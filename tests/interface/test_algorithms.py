"""The equations on plain arrays."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dapo_jax as dx
from dapo_jax.algorithms.policy_loss import LOSSES
from dapo_jax.config.sections import ActorConfig
from dapo_jax.learner.actor import loss_options

RNG = np.random.default_rng(0)


def test_groups_are_kept_if_their_scores_differ():
    scores = np.array([[0.1] * 3, [0.0, 0.0, 1e-6], [1.0, 0.0, 1.0]])
    assert dx.keep_groups(scores).tolist() == [False, True, True]
    assert dx.keep_groups(scores, std_threshold=0.1).tolist() == [False, False, True]
    assert dx.keep_groups(scores, rule="mean_range", filter_low=0.5).tolist() == [False, False, True]


def test_advantages_are_those_of_equation_9():
    rewards = RNG.normal(size=(3, 4)).astype(np.float32)
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    std = rewards.std(axis=1, keepdims=True, ddof=1)
    np.testing.assert_allclose(dx.group_advantages(rewards), centred / (std + 1e-6), rtol=1e-5, atol=1e-6)
    plain = dx.group_advantages(rewards, norm_adv_by_std_in_grpo=False)
    np.testing.assert_allclose(plain, centred, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(dx.group_advantages(rewards, estimator="rloo"), centred * 4 / 3, rtol=1e-5, atol=1e-6)
    lengths = RNG.integers(1, 9, size=(3, 4))
    weighed = rewards - np.average(rewards, axis=1, weights=lengths)[:, None]
    np.testing.assert_allclose(dx.group_advantages(rewards, estimator="opo", lengths=lengths), weighed, atol=1e-6)
    by_tokens = dx.group_advantages(rewards, estimator="reinforce_plus_plus_baseline", lengths=lengths)
    tokens = np.repeat(centred, lengths.reshape(-1))
    np.testing.assert_allclose(by_tokens, (centred - tokens.mean()) / tokens.std(ddof=1), rtol=1e-4, atol=1e-5)


def test_the_loss_is_equation_8_over_all_tokens():
    old, new = RNG.normal(-1, 0.5, (2, 3, 5)).astype(np.float32)
    advantages, mask = np.array([1.0, -2.0, 0.5]), RNG.random((3, 5)) < 0.7
    ratio, a = np.exp(new - old), advantages[:, None]
    loss = np.maximum(-a * ratio, -a * np.clip(ratio, 0.8, 1.28))
    loss = np.where(a < 0, np.minimum(loss, -a * 10), loss)
    found, metrics = dx.policy_loss(new, old, advantages, mask)
    np.testing.assert_allclose(found, loss[mask].mean(), rtol=1e-5)
    clipped = (-a * np.clip(ratio, 0.8, 1.28) > -a * ratio)[mask].mean()
    np.testing.assert_allclose(metrics["pg_clipfrac"], clipped, rtol=1e-5)
    by_response = np.array([row[kept].mean() for row, kept in zip(loss, mask, strict=True)]).mean()
    found, _ = dx.policy_loss(new, old, advantages, mask, aggregation="seq-mean-token-mean")
    np.testing.assert_allclose(found, by_response, rtol=1e-5)


@pytest.mark.short("vanilla")
@pytest.mark.parametrize("loss", ["vanilla", "gspo", "gpg", "cispo", "sapo", "geo_mean"])
def test_masks_may_be_floats_and_losses_are_jitted(loss):
    old, new = RNG.normal(-1, 0.5, (2, 3, 5)).astype(np.float32)
    mask, advantages = RNG.random((3, 5)) < 0.7, jnp.array([1.0, -2.0, 0.5])

    def loss_of(new, mask):
        return dx.policy_loss(new, old, advantages, mask, loss=loss)[0]

    expected, gradient = jax.value_and_grad(loss_of)(new, mask)
    found, other = jax.jit(jax.value_and_grad(loss_of))(new, mask.astype(np.float32))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(other, gradient, rtol=1e-5, atol=1e-7)
    assert np.isfinite(expected) and np.abs(gradient[mask]).max() > 0 and not np.abs(gradient[~mask]).max()


@pytest.mark.parametrize("bad", [-np.inf, np.nan])
def test_values_on_padding_do_not_count(bad):
    old, new = RNG.normal(-1, 0.5, (2, 3, 5)).astype(np.float32)
    mask, advantages = np.arange(5) < np.array([[5], [3], [1]]), RNG.normal(size=(3, 5)).astype(np.float32)

    def found(*arrays):
        return jax.value_and_grad(lambda new, *rest: dx.policy_loss(new, *rest, mask)[0])(*arrays)

    spoilt = found(*(np.where(mask, array, bad) for array in (new, old, advantages)))
    jax.tree.map(np.testing.assert_array_equal, spoilt, found(new, old, advantages))
    grouped = functools.partial(dx.policy_loss, new, old, advantages, mask, aggregation="group-token-mean")
    assert grouped(group_ids=[0, 0, 1])[0] == grouped(group_ids=[70, 70, 9])[0]  # any numbers


def test_the_losses_have_the_defaults_of_the_config():
    options = loss_options(ActorConfig())
    for name, loss in LOSSES.items():
        for parameter in inspect.signature(loss).parameters.values():
            if parameter.name in options:
                assert parameter.default == options[parameter.name], (name, parameter.name)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dx.keep_groups([1.0, 0.0]), "one row per prompt"),
        (lambda: dx.keep_groups([[1.0, 0.0], [1.0]]), "scores must be numbers, as many for each prompt"),
        (lambda: dx.keep_groups([[None, 1.0]]), "scores must be numbers"),
        (lambda: dx.keep_groups([[1.0]], rules="std"), "unknown options rules"),
        (lambda: dx.keep_groups([[1.0]], std_threshold=-1.0), "std_threshold=-1.0 must be 0 or more"),
        (lambda: dx.policy_loss(*[jnp.zeros((1, 2))] * 4, clip_ratio_high=-0.2), "clip_ratio_high=-0.2 must be"),
        (lambda: dx.group_advantages([[1.0, 0.0]], estimator="gae"), "must be one of grpo"),
        (lambda: dx.group_advantages([[1.0, 0.0]], estimator="maxrl"), "must be one of grpo"),
        (lambda: dx.group_advantages([[1.0, 0.0]], estimator="gdpo"), "must be one of grpo"),
        (lambda: dx.group_advantages([[1.0, 0.0]], estimator="opo"), "give lengths"),
        (lambda: dx.group_advantages([[1.0, 0.0]], lengths=[[3, 0]]), "at least 1 for each of the rewards"),
        (lambda: dx.group_advantages([[1.0, 0.0]], estimator="rloo", norm_adv_by_std_in_grpo=False), "read are none"),
        (lambda: dx.group_advantages([[1.0, 0.0]], keep_pos_ratio=0.5), "that are read are norm_adv_by_std_in_grpo"),
        (lambda: dx.keep_groups([[1.0]], filter_low=0.5), "that are read are rule, keep_singletons, std_threshold"),
        (lambda: dx.policy_loss(*[jnp.zeros((1, 2))] * 4, loss="kl_cov"), "must be one of vanilla"),
        (lambda: dx.policy_loss(*[jnp.zeros((1, 2))] * 4, clip_low=0.1), "its options are clip_ratio_low"),
        (
            lambda: dx.policy_loss(*[np.zeros((3, 2))] * 2, np.zeros((3, 1)), np.ones((3, 2))),
            "advantages .3, 1. must have the shape of",
        ),
        (lambda: dx.policy_loss(np.zeros((3, 2)), np.zeros(2), np.zeros(3), np.ones((3, 2))), "old_logprobs .2,. must"),
        (lambda: dx.policy_loss(*[np.zeros((1, 2))] * 4, aggregation="group-token-mean"), "needs group_ids"),
        (lambda: dx.group_advantages([[1.0, np.nan]]), "not finite"),
    ],
)
def test_wrong_input_is_refused_with_what_to_give(call, message):
    with pytest.raises(dx.InputError, match=message):
        call()
