import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.algorithms.aggregation import MODES, token_weights, weighted_sum

CASES = json.loads((Path(__file__).parent / "data" / "aggregation.json").read_text())


def aggregate(loss, mask, mode, **counts):
    return weighted_sum(loss, token_weights(mask, jnp.arange(len(mask)), mode, **counts), mask)


@pytest.mark.parametrize("case", CASES)
def test_modes_equal_the_reference(case):
    """The reference is given the size of the mini-batch where the rows are only a part of it."""
    loss, mask, params = np.array(case["loss"]), np.array(case["mask"]) > 0, case["params"]
    rows, columns = mask.shape
    others = params.get("batch_num_tokens", mask.sum()) - mask.sum()
    whole = np.zeros((rows + 1, max(columns, int(others))), bool)
    whole[:rows, :columns], whole[rows, : int(others)] = mask, True
    weights = token_weights(
        whole,
        np.arange(rows + 1),
        case["mode"],
        num_sequences=params.get("global_batch_size"),
        scale_factor=params.get("loss_scale_factor", columns),
    )
    value = weighted_sum(loss, weights[:rows, :columns], mask)
    np.testing.assert_allclose(value, case["value"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pieces", [2, 6, (1,), (2, 5)])
def test_loss_and_gradient_of_the_pieces_are_those_of_the_whole(mode, pieces):
    rng = np.random.default_rng(0)
    loss, mask = rng.normal(size=(6, 5)).astype(np.float32), np.arange(5) < np.array([[3], [0], [5], [1], [0], [4]])
    weights = np.asarray(token_weights(mask, np.repeat([4, 5], 3), mode, scale_factor=5.0))
    loss_fn = jax.value_and_grad(weighted_sum)
    whole, gradient = loss_fn(loss, weights, mask)
    parts = [loss_fn(*part) for part in zip(*(np.split(x, pieces) for x in (loss, weights, mask)), strict=True)]
    np.testing.assert_allclose(sum(part for part, _ in parts), whole, rtol=1e-5)
    np.testing.assert_allclose(np.concatenate([part for _, part in parts]), gradient, rtol=1e-6)


def test_a_mean_of_means_would_be_another_number():
    loss, mask = jnp.array([[1.0, 1.0, 1.0, 1.0], [5.0, 0, 0, 0]]), jnp.array([[True] * 4, [True] + [False] * 3])
    np.testing.assert_allclose(aggregate(loss, mask, "token-mean"), 1.8)
    np.testing.assert_allclose(aggregate(loss, mask, "seq-mean-token-mean"), 3.0)


def test_group_token_mean_is_the_mean_over_prompts_of_the_mean_over_their_tokens():
    loss = jnp.array([[1.0, 1.0], [4.0, 0.0], [7.0, 0.0], [0.0, 0.0], [9.0, 9.0], [9.0, 9.0]])
    mask = jnp.array([[1, 1], [1, 0], [1, 0], [0, 0], [0, 0], [0, 0]]) > 0
    weights = token_weights(mask, jnp.array([3, 3, 5, 5, 4, 4]), "group-token-mean")
    np.testing.assert_allclose(weighted_sum(loss, weights, mask), (6 / 3 + 7) / 2)  # group 4 has no token


@pytest.mark.parametrize("mode", MODES)
def test_what_is_masked_does_not_count_even_if_it_is_not_a_number(mode):
    loss = jnp.array([[1.0, jnp.nan], [jnp.inf, jnp.nan]])
    mask = jnp.array([[True, False], [False, False]])
    value, gradient = jax.value_and_grad(aggregate)(loss, mask, mode)
    assert value == 1.0 and gradient.tolist() == [[1.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("mode", MODES)
def test_an_empty_batch_gives_zero(mode):
    assert aggregate(jnp.ones((2, 2)), jnp.zeros((2, 2), bool), mode) == 0.0


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="loss_agg_mode='mean'"):
        token_weights(jnp.ones((1, 1), bool), jnp.zeros(1, int), "mean")
