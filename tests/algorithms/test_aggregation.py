import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.algorithms.aggregation import MODES, token_weights, weighted_sum

CASES = json.loads((Path(__file__).parent / "data" / "aggregation.json").read_text())
MOST_TOKENS = 64  # of the rows that a reference has besides its own


value_and_gradient = jax.jit(jax.value_and_grad(weighted_sum))


@jax.jit
def weights_of_every_mode(mask, group_ids, **counts):
    return {mode: token_weights(mask, group_ids, mode, **counts) for mode in MODES}


def aggregate(loss, mask, mode):
    """Value and gradient where each row has a prompt of its own."""
    return value_and_gradient(loss, weights_of_every_mode(mask, np.arange(len(mask)))[mode], mask)


@pytest.mark.parametrize("case", CASES)
def test_modes_equal_the_reference(case):
    """The reference is given the size of the mini-batch where the rows are only a part of it."""
    loss, mask, params = np.float32(case["loss"]), np.array(case["mask"]) > 0, case["params"]
    rows, columns = mask.shape
    others = params.get("batch_num_tokens", mask.sum()) - mask.sum()
    whole = np.zeros((rows + 1, MOST_TOKENS), bool)
    whole[:rows, :columns], whole[rows, : int(others)] = mask, True
    counts = {"scale_factor": params.get("loss_scale_factor", columns)}
    if "global_batch_size" in params:
        counts["num_sequences"] = params["global_batch_size"]
    weights = weights_of_every_mode(whole, np.arange(rows + 1), **counts)[case["mode"]]
    value, _ = value_and_gradient(loss, np.asarray(weights)[:rows, :columns], mask)
    np.testing.assert_allclose(value, case["value"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pieces", [2, 6, (1,), (2, 5)])
def test_loss_and_gradient_of_the_pieces_are_those_of_the_whole(mode, pieces):
    rng = np.random.default_rng(0)
    loss, mask = rng.normal(size=(6, 5)).astype(np.float32), np.arange(5) < np.array([[3], [0], [5], [1], [0], [4]])
    weights = np.asarray(weights_of_every_mode(mask, np.repeat([4, 5], 3), scale_factor=5.0)[mode])
    whole, gradient = value_and_gradient(loss, weights, mask)
    parts = [
        value_and_gradient(*part) for part in zip(*(np.split(x, pieces) for x in (loss, weights, mask)), strict=True)
    ]
    np.testing.assert_allclose(sum(part for part, _ in parts), whole, rtol=1e-5)
    np.testing.assert_allclose(np.concatenate([part for _, part in parts]), gradient, rtol=1e-6)


def test_group_token_mean_is_the_mean_over_prompts_of_the_mean_over_their_tokens():
    loss = np.float32([[1, 1], [4, 0], [7, 0], [0, 0], [9, 9], [9, 9]])
    mask = np.array([[1, 1], [1, 0], [1, 0], [0, 0], [0, 0], [0, 0]]) > 0
    weights = weights_of_every_mode(mask, np.array([3, 3, 5, 5, 4, 4]))["group-token-mean"]
    np.testing.assert_allclose(value_and_gradient(loss, weights, mask)[0], (6 / 3 + 7) / 2)  # group 4 has no token
    apart = weights_of_every_mode(mask, np.array([30, 30, 5, 5, 999, 999]))  # a mini-batch without some groups
    np.testing.assert_array_equal(apart["group-token-mean"], weights)


@pytest.mark.parametrize("mode", MODES)
def test_what_is_masked_does_not_count_even_if_it_is_not_a_number(mode):
    loss = np.float32([[1, np.nan], [np.inf, np.nan]])
    value, gradient = aggregate(loss, np.array([[True, False], [False, False]]), mode)
    assert value == 1.0 and gradient.tolist() == [[1.0, 0.0], [0.0, 0.0]]
    assert aggregate(loss, np.zeros((2, 2), bool), mode)[0] == 0.0, "an empty batch gives zero"


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="loss_agg_mode='mean'"):
        jax.eval_shape(lambda mask: token_weights(mask, jnp.zeros(1, int), "mean"), np.ones((1, 1), bool))
