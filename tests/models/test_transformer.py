import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.checkpoints import DATA, NAMES, expected_logits, loss, model, score, tolerance

from dapo_jax.models.layers import layer_weights
from dapo_jax.models.remat import POLICIES
from dapo_jax.models.transformer import head_table, positions_of, rounded_head
from dapo_jax.models.weights import cast_matrices

loss_and_gradient = jax.jit(jax.value_and_grad(loss), static_argnums=(3, 4))


def small_model(name):
    """Of the first two layers only, or of one repetition of their kinds, which compile faster."""
    arch, params = model(name)
    num_layers = max(2, len(arch.pattern))
    arch = dataclasses.replace(arch, num_layers=num_layers)
    params = params | {"layers": {name: leaf[:num_layers] for name, leaf in params["layers"].items()}}
    return arch, cast_matrices(params, arch, np.float32)


def unstack(params, arch):
    return params | {"layers": layer_weights(params["layers"], arch)}


def random_tokens(arch, *shape, seed=0):
    return np.random.default_rng(seed).integers(0, arch.vocab_size, shape, np.int32)


# Layers are stacked for training and a list for decoding, which the tests below compare with stacked ones: as a list,
# the long lane has a dense model and one with experts.
@pytest.mark.short("stacked")
@pytest.mark.long("gemma3-list", "qwen3_moe_mixed-list")
@pytest.mark.parametrize("layers", ["stacked", "list"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_those_of_transformers(name, layers):
    arch, params = model(name)
    reference = np.load(DATA / name / "reference.npz")
    mask = reference["attention_mask"].astype(bool)
    scores = score(unstack(params, arch) if layers == "list" else params, reference["input_ids"], mask, arch)
    assert scores.dtype == jnp.float32
    np.testing.assert_allclose(scores[mask], expected_logits(DATA / name)[mask], rtol=0, atol=tolerance(name))


@pytest.mark.short("mixed")
@pytest.mark.parametrize("places", [(0, 0, 0, 0), (8, 8, 8, 8), (0, 0, 3, 8)], ids=["left", "right", "mixed"])
def test_padding_changes_nothing(places):
    arch, params = small_model("qwen2_bias_tied")
    tokens = random_tokens(arch, 3, 8)
    padded = np.insert(tokens, places, 7, axis=1)
    mask = np.insert(np.ones_like(tokens, bool), places, False, axis=1)
    plain = score(params, tokens, np.ones_like(tokens, bool), arch)
    np.testing.assert_allclose(score(params, padded, mask, arch)[:, mask[0]], plain, rtol=0, atol=1e-5)


def test_a_row_of_padding_gives_finite_values_and_gradients():
    arch, params = small_model("qwen3_qknorm")
    tokens = random_tokens(arch, 2, 8)
    mask = np.array([[True] * 8, [False] * 8])
    value, gradient = loss_and_gradient(params, tokens, mask, arch)
    assert np.isfinite(value) and all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


@pytest.mark.slow
@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "none"])
def test_rematerialisation_changes_no_value_and_no_gradient(policy):
    arch, params = small_model("qwen3_qknorm")
    tokens = random_tokens(arch, 2, 8)
    mask = np.ones_like(tokens, bool)
    kept, recomputed = (loss_and_gradient(params, tokens, mask, arch, remat) for remat in ("none", policy))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), kept, recomputed)


@pytest.mark.slow
def test_gradients_through_bfloat16_weights_follow_those_in_float32():
    arch, params = small_model("qwen3_qknorm")
    tokens = random_tokens(arch, 2, 8)
    mask = np.ones_like(tokens, bool)
    _, exact = loss_and_gradient(params, tokens, mask, arch)
    params = cast_matrices(params, arch, jnp.bfloat16)
    _, rounded = loss_and_gradient(params, tokens, mask, arch)
    leaves = (jax.tree.leaves(tree) for tree in (params, exact, rounded))
    for leaf, expected, gradient in zip(*leaves, strict=True):
        assert gradient.dtype == leaf.dtype
        expected, gradient = (np.asarray(x, np.float32).ravel() for x in (expected, gradient))
        assert np.isfinite(gradient).all()
        assert expected @ gradient > 0.99 * np.linalg.norm(expected) * np.linalg.norm(gradient)


def test_positions_count_real_tokens():
    mask = np.array([[False, False, True, True], [True, False, True, False], [False] * 4])
    assert positions_of(mask).tolist() == [[0, 0, 0, 1], [0, 0, 1, 1], [0, 0, 0, 0]]


def test_gradients_of_a_head_that_is_cast_once_add_up_in_float32():
    table = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    params = {"embedding": table, "layers": {"query": jnp.zeros((1, 1), jnp.bfloat16)}}

    @jax.grad
    def gradient(params):
        rounded = rounded_head(params)

        def add(total, scale):
            return total + jnp.sum(scale * head_table(params, rounded).astype(jnp.float32)), None

        return jax.lax.scan(add, 0.0, jnp.full(1000, 1e-3))[0]

    found = gradient(params)["embedding"]
    np.testing.assert_array_equal(head_table(params, rounded_head(params)), head_table(params))
    assert found.dtype == jnp.float32 and rounded_head(params | {"embedding": table.astype(jnp.bfloat16)}) is None
    np.testing.assert_allclose(found, 1.0, rtol=2e-3)  # a bfloat16 sum stops growing at 0.25
