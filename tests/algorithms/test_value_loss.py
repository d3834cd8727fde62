import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.algorithms.aggregation import token_weights, weighted_sum
from dapo_jax.algorithms.value_loss import clipped_value_loss

CASES = json.loads((Path(__file__).parent / "data" / "value_loss.json").read_text())


@jax.jit
def loss_metrics_and_gradient(inputs, options):
    mask = inputs["response_mask"] > 0

    def total(values):
        loss, metrics = clipped_value_loss(values, inputs["values"], inputs["returns"], mask, **options)
        return weighted_sum(loss, token_weights(mask, jnp.arange(len(mask)), "token-mean"), mask), metrics

    return jax.value_and_grad(total, has_aux=True)(inputs["vpreds"])


@pytest.mark.parametrize("case", CASES)
def test_loss_gradient_and_clip_fraction_equal_the_reference(case):
    inputs = {name: np.array(value, np.float32) for name, value in case["inputs"].items()}
    (loss, metrics), gradient = jax.device_get(loss_metrics_and_gradient(inputs, case["params"]))
    np.testing.assert_allclose(loss, case["expected"]["loss"], rtol=1e-5)
    np.testing.assert_allclose(gradient, case["expected"]["grad"], atol=1e-5)
    clipfrac = metrics["vf_clipfrac"]
    np.testing.assert_allclose(clipfrac.total / clipfrac.count, case["expected"]["clipfrac"], atol=1e-5)
