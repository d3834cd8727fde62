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
from dapo_jax.rewards.reward_model import build_reward_model, conversation_scores

ARCH = dataclasses.replace(shapes.ARCH, tie_embeddings=True, scalar_head=True)
# The second ends with the token that the rows are padded with.
CONVERSATIONS = [[5, 6, 7, 8, 9], [2, 9, 2], [3, 4, 5, 6, 7, 8, 9, 10], [11]] * 2
PAD = 2


@pytest.fixture(scope="module")
def params():
    made = jax.device_get(jax.jit(init_params, static_argnums=0)(ARCH, 0))
    assert not made["score"].any()
    return {**made, "score": np.random.default_rng(0).normal(size=48).astype(np.float32)}


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


def test_a_score_is_the_heads_value_at_the_last_token_of_the_unpadded_conversation(params):
    tokens, mask = pad_prompts(CONVERSATIONS[:4], 8, PAD)
    scores = jax.jit(conversation_scores, static_argnums=3)(params, tokens, mask, ARCH)
    forward = jax.jit(transformer.forward, static_argnums=4)
    assert scores.shape == (4,) and scores.dtype == jnp.float32
    for conversation, score in zip(CONVERSATIONS, scores, strict=False):
        row = jnp.array([conversation])
        hidden = forward(params, row, jnp.arange(row.shape[1])[None], jnp.ones(row.shape, bool), ARCH)
        assert score == pytest.approx(np.asarray(hidden)[0, -1] @ params["score"], abs=1e-5)


def test_padding_changes_nothing(params):
    scores, _ = scores_on((1, 1, 1), params)
    assert np.ptp(scores[:4]) > 0.1
    wider, _ = scores_on((1, 1, 1), params, width=12, pad_id=63)
    np.testing.assert_allclose(wider, scores, atol=1e-5)


@pytest.mark.parametrize("shape", [(8, 1, 1), (2, 2, 2)])
def test_the_mesh_changes_nothing(params, shape):
    scores, weights = scores_on(shape, params)
    assert scores.sharding.is_fully_replicated
    assert weights["layers"]["up"].sharding.is_fully_replicated == (shape == (8, 1, 1))
    np.testing.assert_allclose(scores, scores_on((1, 1, 1), params)[0], atol=1e-5)


def test_frozen_matrices_have_the_dtype_of_products_and_the_head_stays_exact(params):
    scores, weights = scores_on((1, 1, 1), params, dtype=jnp.bfloat16)
    assert weights["embedding"].dtype == weights["layers"]["down"].dtype == jnp.bfloat16
    assert weights["score"].dtype == weights["final_norm"].dtype == scores.dtype == jnp.float32
    np.testing.assert_array_equal(weights["score"], params["score"])
    exact, _ = scores_on((1, 1, 1), params)
    np.testing.assert_allclose(scores, exact, atol=0.3)
    assert (scores != exact).all()
