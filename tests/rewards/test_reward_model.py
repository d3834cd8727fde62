import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import shapes
from shapes import mesh_of

from dapo_jax.data.padding import pad_prompts
from dapo_jax.models import transformer
from dapo_jax.models.weights import init_params, unflatten, weight_table
from dapo_jax.parallel.sharding import TRAIN_RULES, batch_sharding, place_weight, put
from dapo_jax.rewards.reward_model import build_reward_model

ARCH = dataclasses.replace(shapes.ARCH, tie_embeddings=True, scalar_head=True)
# The second ends with the token that the rows are padded with.
CONVERSATIONS = [[5, 6, 7, 8, 9], [2, 9, 2], [3, 4, 5, 6, 7, 8, 9, 10], [11]] * 2
PAD = 2


@pytest.fixture(scope="module")
def params():
    made = jax.device_get(jax.jit(init_params, static_argnums=0)(ARCH, 0))
    assert not made["score"].any()
    return {**made, "score": np.random.default_rng(0).normal(size=48).astype(np.float32)}


@pytest.fixture(scope="module")
def expected(params):
    """The head's value at the last token of each conversation alone, without padding."""
    forward = jax.jit(transformer.forward, static_argnums=4)
    scores = []
    for conversation in CONVERSATIONS[:4]:
        row = jnp.array([conversation])
        hidden = forward(params, row, np.arange(row.shape[1])[None], np.ones(row.shape, bool), ARCH)
        scores.append(np.asarray(hidden)[0, -1] @ params["score"])
    assert np.ptp(scores) > 0.1
    return np.array(scores * 2)


def scores_on(shape, params, dtype=jnp.float32, width=8, pad_id=PAD):
    mesh = mesh_of(shape)
    place = place_weight(mesh, TRAIN_RULES)
    placed = unflatten(
        (weight, place(weight, functools.reduce(operator.getitem, weight.path, params)))
        for weight in weight_table(ARCH)
    )
    with jax.set_mesh(mesh):
        model = build_reward_model(ARCH, dtype, mesh)
        weights = model.freeze(placed)
        scores = model.scores(weights, *put(pad_prompts(CONVERSATIONS, width, pad_id), batch_sharding(mesh)))
    return scores, weights


@pytest.mark.short("shape0", "shape1", "shape2")
@pytest.mark.parametrize(
    ("shape", "width", "pad_id"), [((1, 1, 1), 8, PAD), ((1, 1, 1), 12, 63), ((2, 2, 2), 8, PAD), ((8, 1, 1), 8, PAD)]
)
def test_padding_and_mesh_change_no_score(params, expected, shape, width, pad_id):
    scores, weights = scores_on(shape, params, width=width, pad_id=pad_id)
    assert scores.shape == (8,) and scores.dtype == jnp.float32 and scores.sharding.is_fully_replicated
    assert weights["layers"]["up"].sharding.is_fully_replicated == (shape != (2, 2, 2))
    np.testing.assert_allclose(scores, expected, atol=1e-5)


def test_frozen_matrices_have_the_dtype_of_products_and_the_head_stays_exact(params, expected):
    scores, weights = scores_on((1, 1, 1), params, dtype=jnp.bfloat16)
    assert weights["embedding"].dtype == weights["layers"]["down"].dtype == jnp.bfloat16
    assert weights["score"].dtype == weights["final_norm"].dtype == scores.dtype == jnp.float32
    np.testing.assert_array_equal(weights["score"], params["score"])
    np.testing.assert_allclose(scores, expected, atol=0.3)
    assert (np.abs(scores - expected) > 1e-5).all()
