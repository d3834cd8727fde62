import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import traverse_util
from shapes import ARCH

from dapo_jax.config.sections import ActorConfig, OptimConfig
from dapo_jax.learner import optimizer
from dapo_jax.learner.optimizer import init_state, learning_rate
from dapo_jax.models.architecture import Experts, Layer
from dapo_jax.models.weights import init_params, weight_table

apply_gradients = jax.jit(optimizer.apply_gradients, static_argnames=("options", "table"))
OPTIM = OptimConfig(betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
OPTIONS = ActorConfig(optim=OPTIM, grad_clip=1.0)


def test_updates_are_clipped_adamw():
    rng = np.random.default_rng(0)
    params = {"a": rng.normal(size=(3, 2)).astype(np.float32), "b": np.array([1.0, -2.0], np.float32)}
    reference = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(1e-2, b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.1)
    )
    update = jax.jit(reference.update)
    moments, expected, state = reference.init(params), params, init_state(params, OPTIM)
    for scale in (0.01, 3.0, 0.5):
        gradients = jax.tree.map(lambda x, scale=scale: (scale * rng.normal(size=x.shape)).astype(x.dtype), params)
        updates, moments = update(gradients, moments, expected)
        expected = optax.apply_updates(expected, updates)
        state, norm = apply_gradients(state, gradients, jnp.float32(1e-2), OPTIONS)
        np.testing.assert_allclose(norm, np.sqrt(sum(np.sum(x**2) for x in gradients.values())), rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), state.params, expected)
    assert state.updates == 3 and state.skipped == 0


def orthogonal(matrix):
    """Five Newton-Schulz steps of a matrix [inputs, outputs] (arXiv:2502.16982, equation 3)."""
    x = matrix / (np.linalg.norm(matrix) + 1e-8)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x


@pytest.mark.slow
@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_muon_orthogonalises_each_matrix_of_a_layer_and_leaves_the_rest_to_adam(moments):
    """Of projections to heads and from heads, and of each expert; tables, norms and biases are Adam's."""
    optim = dataclasses.replace(OPTIM, optimizer="muon", moments_dtype=moments)
    options = ActorConfig(optim=optim, grad_clip=1e9)
    experts = Experts(number=3, per_token=2, intermediate_size=6, normalized=True)
    arch = dataclasses.replace(ARCH, qkv_bias=True, experts=experts, pattern=(Layer(experts=True),))
    table, shapes = tuple(weight_table(arch)), jax.eval_shape(lambda: init_params(arch, 0))
    rng = np.random.default_rng(0)
    params, first, second = (
        jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), shapes) for _ in range(3)
    )
    state, _ = apply_gradients(init_state(params, optim, table), first, jnp.float32(0.0), options, table)
    after, _ = apply_gradients(state, second, jnp.float32(1.0), options, table)
    params, first, second, new = map(traverse_util.flatten_dict, (params, first, second, after.params))
    matrices = [weight for weight in table if weight.matrix_axes is not None]
    names = {"query", "key", "value", "output", "router", "expert_gate", "expert_up", "expert_down"}
    assert {weight.path[-1] for weight in matrices} == names
    for weight in matrices:
        outputs, inputs = weight.hf_shape
        arrays = [np.asarray(tree[weight.path], np.float64) for tree in (params, first, second, new)]
        for param, old, gradient, found in zip(*(x.reshape(-1, inputs, outputs) for x in arrays), strict=True):
            momentum = 0.95 * (0.95 * 0.05 * old + 0.05 * gradient) / (1 - 0.95**3) + 0.05 * gradient / (1 - 0.95**2)
            step = 0.2 * max(inputs, outputs) ** 0.5 * orthogonal(momentum) + optim.weight_decay * param
            np.testing.assert_allclose(param - found, step, atol=1e-4 if moments == "float32" else 0.02)
    kept = jax.tree.leaves(after.moments)
    assert {x.dtype for x in kept if x.size > 3} == {jnp.dtype(moments)}
    numbers = 2 * sum(x.size for x in params.values()) - sum(params[weight.path].size for weight in matrices)
    assert sum(x.size for x in kept if x.size > 3) == numbers
    ones = {"a": np.ones(3, np.float32)}
    alone, plain = (
        apply_gradients(init_state(ones, one), ones, jnp.float32(1.0), ActorConfig(optim=one, grad_clip=1e9))[0].params[
            "a"
        ]
        for one in (optim, dataclasses.replace(optim, optimizer="adamw"))
    )
    np.testing.assert_array_equal(alone, plain)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_changes_only_the_count(bad):
    state = init_state({"a": jnp.ones(3)}, OPTIM)
    after, _ = apply_gradients(state, {"a": jnp.array([0.0, bad, 1.0])}, jnp.float32(1e-2), OPTIONS)
    assert after.skipped == 1
    jax.tree.map(np.testing.assert_array_equal, after.replace(skipped=state.skipped), state)


def rate(step, **changes):
    total = changes.pop("total_steps", 12)
    options = {"lr": 1.0, "lr_warmup_steps": 4, "lr_scheduler_type": "constant", "min_lr_ratio": 0.1}
    return learning_rate(OptimConfig(**{**options, **changes}), step, total_steps=total)


def test_the_warm_up_starts_above_zero():
    assert [rate(step) for step in (1, 2, 4, 5, 12)] == [0.25, 0.5, 1.0, 1.0, 1.0]
    assert rate(1, lr_warmup_steps=0) == 1.0
    assert rate(0, lr_warmup_steps=0) == rate(-1) == 0.0  # before the policy's first step


def test_cosine_ends_at_the_smallest_rate():
    rates = [rate(step, lr_scheduler_type="cosine") for step in range(4, 13)]
    assert rates[0] == 1.0 and rates[-1] == pytest.approx(0.1)
    assert all(first > second for first, second in zip(rates[:-1], rates[1:], strict=True))
