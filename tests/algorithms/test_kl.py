import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.algorithms.kl import PENALTIES, adapted_coefficient, kl_penalty

CASES = json.loads((Path(__file__).parent / "data" / "kl.json").read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_values_and_gradients_equal_the_reference(case):
    logprobs, reference = (jnp.array(case["inputs"][name]) for name in ("log_prob", "ref_log_prob"))
    np.testing.assert_allclose(kl_penalty(logprobs, reference, case["name"]), case["expected"]["kl"], atol=1e-5)
    gradient = jax.grad(lambda x: kl_penalty(x, reference, case["name"]).sum())(logprobs)
    np.testing.assert_allclose(gradient, case["expected"]["grad_of_sum"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("estimator", PENALTIES)
def test_equal_policies_have_no_divergence(estimator):
    logprobs = jnp.array([-1.0, -20.0])
    assert (kl_penalty(logprobs, logprobs, estimator) == 0).all()


def test_a_plus_keeps_the_value_and_takes_the_gradient_of_k2():
    x, y = jnp.array([-1.0, -3.0]), jnp.array([-2.0, -1.5])
    for name in ("k1", "k3", "abs"):
        np.testing.assert_allclose(kl_penalty(x, y, name + "+"), kl_penalty(x, y, name), rtol=1e-6)
        gradient = jax.grad(lambda x, name=name: kl_penalty(x, y, name + "+").sum())(x)
        np.testing.assert_allclose(gradient, x - y, rtol=1e-6)


def test_unbiased_estimators_average_to_the_divergence():
    p, q = jax.nn.softmax(jnp.array([0.0, 1.0, 2.0])), jax.nn.softmax(jnp.array([1.0, 0.5, 0.0]))
    exact = jnp.sum(p * jnp.log(p / q))
    for name in ("k1", "k3"):
        np.testing.assert_allclose(jnp.sum(p * kl_penalty(jnp.log(p), jnp.log(q), name)), exact, rtol=1e-5)


@pytest.mark.parametrize("estimator", PENALTIES)
def test_rounding_between_equal_policies_has_no_gradient_of_its_own(estimator):
    logprobs = jnp.array([-1.0, -2.0])

    def gradient(rounding: float):
        return jax.grad(lambda x: kl_penalty(x, logprobs, estimator).sum())(logprobs + rounding)

    np.testing.assert_allclose(gradient(1e-6), gradient(-1e-6), atol=1e-5)


def test_an_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match=r"'k4' must be one of k1, "):
        kl_penalty(jnp.zeros(1), jnp.zeros(1), "k4")


def test_the_controller_moves_towards_its_target():
    options = {"target_kl": 0.1, "horizon": 1000.0, "num_sequences": 100}
    assert adapted_coefficient(0.01, 0.1, **options) == 0.01
    assert adapted_coefficient(0.01, 0.11, **options) == pytest.approx(0.01 * (1 + 0.1 * 0.1))
    assert adapted_coefficient(0.01, 5.0, **options) == pytest.approx(0.01 * (1 + 0.2 * 0.1))  # at most 0.2
    assert adapted_coefficient(0.01, 0.0, **options) == pytest.approx(0.01 * (1 - 0.2 * 0.1))
