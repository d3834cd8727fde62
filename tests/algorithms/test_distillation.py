import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.algorithms.distillation import coarse_reverse_kl

ROWS, VOCABULARY = 200, 7


def of_best(logits, other, count):
    """The log-probabilities of the `count` most likely tokens of `logits`, by both."""
    ids = jax.lax.top_k(logits, count)[1]
    return [jnp.take_along_axis(jax.nn.log_softmax(one), ids, axis=-1) for one in (logits, other)]


def whole(logits, other):
    p, q = jax.nn.log_softmax(logits), jax.nn.log_softmax(other)
    return jnp.sum(jnp.exp(p) * (p - q), axis=-1)


def differentiated(logits, other):
    """The coarse divergence of three tokens, with derivatives of its logarithms."""
    p, q = (jnp.exp(one) for one in of_best(logits, other, 3))
    p, q = (jnp.concatenate([one, 1 - jnp.sum(one, axis=-1, keepdims=True)], axis=-1) for one in (p, q))
    return jnp.sum(p * jnp.log(p / q), axis=-1)


@jax.jit
def divergences(logits, other):
    """Values [ROWS] and gradients [ROWS, VOCABULARY] of the above, and of the coarse one by its number of tokens."""

    def coarse(count):
        return lambda logits, other: coarse_reverse_kl(*of_best(logits, other, count))

    functions = {str(count): coarse(count) for count in range(1, VOCABULARY + 1)}
    functions |= {"whole": whole, "differentiated": differentiated}
    found = {name: jax.vjp(lambda x, f=function: f(x, other), logits) for name, function in functions.items()}
    return {name: (values, *pull_back(jnp.ones(ROWS))) for name, (values, pull_back) in found.items()}


@functools.cache
def random_pair():
    logits, other = np.random.default_rng(0).normal(0, 2, (2, ROWS, VOCABULARY)).astype(np.float32)
    return logits, other, divergences(logits, other)


def test_by_hand():
    student, teacher = np.log([[0.5, 0.3]]), np.log([[0.25, 0.25]])  # the rest: 0.2 and 0.5
    expected = 0.5 * np.log(2) + 0.3 * np.log(1.2) + 0.2 * np.log(0.4)
    np.testing.assert_allclose(jax.jit(coarse_reverse_kl)(student, teacher), [expected], rtol=1e-5)


@pytest.mark.parametrize("count", [VOCABULARY - 1, VOCABULARY])
def test_with_all_tokens_it_is_the_whole_divergence_and_its_gradient(count):
    *_, found = random_pair()
    (values, gradient), (expected, expected_gradient) = found[str(count)], found["whole"]
    np.testing.assert_allclose(values.sum(), expected.sum(), rtol=1e-5)
    np.testing.assert_allclose(gradient, expected_gradient, atol=2e-5)


def test_it_grows_with_the_tokens_from_zero_to_the_whole_divergence():
    *_, found = random_pair()
    values = [np.asarray(found[name][0]) for name in (*"123456", "whole")]
    assert (values[0] > -1e-6).all()
    for fewer, more in zip(values, values[1:], strict=False):
        assert (more - fewer > -1e-5).all()


def test_the_gradient_is_that_of_the_coarse_divergence():
    """Though the logarithms are not differentiated."""
    *_, found = random_pair()
    np.testing.assert_allclose(found["3"][1], found["differentiated"][1], atol=2e-5)


def test_a_teacher_that_is_the_student_asks_for_nothing():
    values, gradient = divergences(random_pair()[0], random_pair()[0])["3"]
    assert not values.any() and not gradient.any()


def test_a_certain_model_leaves_it_finite():
    """Float32 has no probability left for the rest, by either model."""
    sure, unsure = [200.0, 0, 0, 0, 0, 0, 0], [3.0, 2, 2, 2, 2, 2, 2]
    pairs = np.float32([(sure, unsure), (unsure, sure), (sure, sure)])
    pairs = np.resize(pairs, (ROWS, *pairs.shape[1:]))
    values, gradient = divergences(pairs[:, 0], pairs[:, 1])["2"]
    assert np.isfinite(values).all() and (values > -1e-4).all() and np.isfinite(gradient).all()
