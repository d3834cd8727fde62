import json
from pathlib import Path

import jax
import numpy as np
import pytest

from dapo_jax.algorithms.kl import PENALTIES, adapted_coefficient, kl_penalty

CASES = json.loads((Path(__file__).parent / "data" / "kl.json").read_text())
SHAPE = 4, 6  # of the reference; all tests have it


@jax.jit
def of_every_estimator(logprobs, reference):
    """Values, and the gradient of their sum."""

    def penalised(estimator):
        values, pull_back = jax.vjp(lambda x: kl_penalty(x, reference, estimator), logprobs)
        return values, *pull_back(np.ones(SHAPE, np.float32))

    return {estimator: penalised(estimator) for estimator in PENALTIES}


def penalties(logprobs, reference):
    arrays = (np.resize(np.array(one, np.float32), SHAPE) for one in (logprobs, reference))
    return jax.device_get(of_every_estimator(*arrays))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_values_and_gradients_equal_the_reference(case):
    values, gradient = penalties(case["inputs"]["log_prob"], case["inputs"]["ref_log_prob"])[case["name"]]
    np.testing.assert_allclose(values, case["expected"]["kl"], atol=1e-5)
    np.testing.assert_allclose(gradient, case["expected"]["grad_of_sum"], rtol=1e-5, atol=1e-5)


def test_equal_policies_have_no_divergence():
    for name, (values, _) in penalties([-1.0, -20.0], [-1.0, -20.0]).items():
        assert (values == 0).all(), name


def test_a_plus_keeps_the_value_and_takes_the_gradient_of_k2():
    x, y = np.array([-1.0, -3.0]), np.array([-2.0, -1.5])
    found = penalties(x, y)
    for name in ("k1", "k3", "abs"):
        values, gradient = found[name + "+"]
        np.testing.assert_allclose(values, found[name][0], rtol=1e-6)
        np.testing.assert_allclose(gradient, np.resize(x - y, SHAPE), rtol=1e-6)


def test_unbiased_estimators_average_to_the_divergence():
    p, q = (np.exp(logits) / np.exp(logits).sum() for logits in ([0.0, 1.0, 2.0], [1.0, 0.5, 0.0]))
    found = penalties(np.log(p), np.log(q))
    for name in ("k1", "k3"):
        np.testing.assert_allclose(np.sum(p * found[name][0][0, :3]), np.sum(p * np.log(p / q)), rtol=1e-5)


def test_rounding_between_equal_policies_has_no_gradient_of_its_own():
    logprobs = np.array([-1.0, -2.0])
    above, below = (penalties(logprobs + rounding, logprobs) for rounding in (1e-6, -1e-6))
    for name, (_, gradient) in above.items():
        np.testing.assert_allclose(gradient, below[name][1], atol=1e-5, err_msg=name)


def test_an_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match=r"'k4' must be one of k1, "):
        kl_penalty(np.zeros(1), np.zeros(1), "k4")


def test_the_controller_moves_towards_its_target():
    options = {"target_kl": 0.1, "horizon": 1000.0, "num_sequences": 100}
    assert adapted_coefficient(0.01, 0.1, **options) == 0.01
    assert adapted_coefficient(0.01, 0.11, **options) == pytest.approx(0.01 * (1 + 0.1 * 0.1))
    assert adapted_coefficient(0.01, 5.0, **options) == pytest.approx(0.01 * (1 + 0.2 * 0.1))  # at most 0.2
    assert adapted_coefficient(0.01, 0.0, **options) == pytest.approx(0.01 * (1 - 0.2 * 0.1))
