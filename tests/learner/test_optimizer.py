import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dapo_jax.learner.optimizer import OptimizerSettings, apply_gradients, init_state, learning_rate

SETTINGS = OptimizerSettings(betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, grad_clip=1.0)


def test_updates_are_clipped_adamw():
    rng = np.random.default_rng(0)
    params = {"a": jnp.array(rng.normal(size=(3, 2)), jnp.float32), "b": jnp.array([1.0, -2.0])}
    reference = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(1e-2, b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.1)
    )
    moments, expected, state = reference.init(params), params, init_state(params, SETTINGS)
    for scale in (0.01, 3.0, 0.5):
        gradients = jax.tree.map(lambda x, scale=scale: jnp.array(scale * rng.normal(size=x.shape), x.dtype), params)
        updates, moments = reference.update(gradients, moments, expected)
        expected = optax.apply_updates(expected, updates)
        state, norm = apply_gradients(state, gradients, jnp.float32(1e-2), SETTINGS)
        np.testing.assert_allclose(norm, optax.global_norm(gradients), rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), state.params, expected)
    assert state.updates == 3 and state.skipped == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_changes_only_the_count(bad):
    state = init_state({"a": jnp.ones(3)}, SETTINGS)
    after, _ = apply_gradients(state, {"a": jnp.array([0.0, bad, 1.0])}, jnp.float32(1e-2), SETTINGS)
    assert after.skipped == 1
    jax.tree.map(np.testing.assert_array_equal, after.replace(skipped=state.skipped), state)


def rate(step, **changes):
    settings = {"lr": 1.0, "warmup_steps": 4, "scheduler": "constant", "total_steps": 12, "min_ratio": 0.1}
    return learning_rate(step, **{**settings, **changes})


def test_the_warm_up_starts_above_zero():
    assert [rate(step) for step in (1, 2, 4, 5, 12)] == [0.25, 0.5, 1.0, 1.0, 1.0]
    assert rate(1, warmup_steps=0) == 1.0
    assert rate(0, warmup_steps=0) == rate(-1) == 0.0  # before the policy's first step


def test_cosine_ends_at_the_smallest_rate():
    rates = [rate(step, scheduler="cosine") for step in range(4, 13)]
    assert rates[0] == 1.0 and rates[-1] == pytest.approx(0.1)
    assert all(first > second for first, second in zip(rates[:-1], rates[1:], strict=True))
