import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.algorithms.distillation import coarse_reverse_kl

VOCABULARY = 7


def of_best(logits, other, count):
    """The log-probabilities of the `count` most likely tokens of `logits`, by both."""
    ids = jax.lax.top_k(logits, count)[1]
    return [jnp.take_along_axis(jax.nn.log_softmax(one), ids, axis=-1) for one in (logits, other)]


def whole_kl(logits, other):
    p, q = jax.nn.log_softmax(logits), jax.nn.log_softmax(other)
    return jnp.sum(jnp.exp(p) * (p - q), axis=-1)


@pytest.fixture
def pair():
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(0, 2, (200, VOCABULARY)), jnp.float32) for _ in range(2)]


def test_by_hand():
    student, teacher = np.log([[0.5, 0.3]]), np.log([[0.25, 0.25]])  # the rest: 0.2 and 0.5
    expected = 0.5 * np.log(2) + 0.3 * np.log(1.2) + 0.2 * np.log(0.4)
    np.testing.assert_allclose(coarse_reverse_kl(jnp.array(student), jnp.array(teacher)), [expected], rtol=1e-5)


@pytest.mark.parametrize("count", [VOCABULARY - 1, VOCABULARY])
def test_with_all_tokens_it_is_the_whole_divergence_and_its_gradient(pair, count):
    def total(function):
        return jax.value_and_grad(lambda logits: jnp.sum(function(logits, pair[1])))(pair[0])

    value, gradient = total(lambda logits, other: coarse_reverse_kl(*of_best(logits, other, count)))
    expected, expected_gradient = total(whole_kl)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(gradient, expected_gradient, atol=2e-5)


def test_it_grows_with_the_tokens_from_zero_to_the_whole_divergence(pair):
    values = [coarse_reverse_kl(*of_best(*pair, count)) for count in range(1, VOCABULARY)] + [whole_kl(*pair)]
    assert (values[0] > -1e-6).all()
    for fewer, more in zip(values, values[1:], strict=False):
        assert (more - fewer > -1e-5).all()


def test_the_gradient_is_that_of_the_coarse_divergence(pair):
    """Though the logarithms are not differentiated."""

    def plain(logits):
        p, q = (jnp.exp(one) for one in of_best(logits, pair[1], 3))
        p, q = (jnp.concatenate([one, 1 - jnp.sum(one, axis=-1, keepdims=True)], axis=-1) for one in (p, q))
        return jnp.sum(p * jnp.log(p / q))

    found = jax.grad(lambda logits: jnp.sum(coarse_reverse_kl(*of_best(logits, pair[1], 3))))(pair[0])
    np.testing.assert_allclose(found, jax.grad(plain)(pair[0]), atol=2e-5)


def test_a_teacher_that_is_the_student_asks_for_nothing(pair):
    value, gradient = jax.value_and_grad(lambda x: jnp.sum(coarse_reverse_kl(x, jax.lax.stop_gradient(x))))(
        of_best(pair[0], pair[0], 3)[0]
    )
    assert value == 0 and not gradient.any()


@pytest.mark.parametrize(("sure", "other"), [(0, 1), (1, 0), (0, 0)])
def test_a_certain_model_leaves_it_finite(sure, other):
    """Float32 has no probability left for the rest, by either model."""
    logits = jnp.array([[200.0, 0, 0, 0, 0, 0, 0], [3.0, 2, 2, 2, 2, 2, 2]])[jnp.array([sure, other])]
    value, gradient = jax.value_and_grad(lambda x: coarse_reverse_kl(*of_best(x, logits[1], 2)))(logits[0])
    assert np.isfinite(value) and value > -1e-4 and np.isfinite(gradient).all()
