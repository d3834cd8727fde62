import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.models.vocabulary_blocks import BLOCK
from dapo_jax.rollout import sampling as sampling_module
from dapo_jax.rollout.sampling import EVALUATE, SELECT, TRAIN, Sampling, inverse_cdf, position_noise, row_keys

LOGITS = np.random.default_rng(0).normal(size=300).astype(np.float32) * 2
DRAWS = 20000


def sample(logits, *arguments):
    missing = -logits.shape[1] % BLOCK
    blocks = jnp.pad(logits, ((0, 0), (0, missing)), constant_values=-jnp.inf).reshape(len(logits), -1, BLOCK)
    return sampling_module.sample(blocks, *arguments)


def draw(sampling, logits=LOGITS):
    keys = row_keys(0, TRAIN, jnp.arange(DRAWS // 8), 8)
    return jax.jit(sample)(jnp.broadcast_to(logits, (DRAWS, len(logits))), keys, jnp.int32(3), sampling)


def expected_probabilities(temperature, top_p, top_k):
    logits = LOGITS / temperature
    order = np.argsort(-logits)
    probabilities = np.exp(logits - logits.max())
    if top_k > 0:
        probabilities[order[top_k:]] = 0
    probabilities /= probabilities.sum()
    before = np.cumsum(probabilities[order]) - probabilities[order]
    probabilities[order[before >= top_p]] = 0
    return probabilities / probabilities.sum()


@pytest.mark.short("1.2-0.8-20", "1.3-1.0-7")
@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(1.0, 1.0, -1), (0.6, 1.0, -1), (1.0, 0.7, -1), (1.3, 1.0, 7), (1.2, 0.8, 20)]
)
def test_samples_have_the_probabilities_of_the_model(temperature, top_p, top_k):
    tokens, _ = draw(Sampling.create(temperature, top_p, top_k))
    probabilities = expected_probabilities(temperature, top_p, top_k)
    counts = np.bincount(tokens, minlength=len(LOGITS))
    assert counts[probabilities == 0].sum() == 0
    likely = probabilities * DRAWS >= 5
    rest = probabilities[~likely].sum() * DRAWS
    chi_square = np.sum((counts[likely] - probabilities[likely] * DRAWS) ** 2 / (probabilities[likely] * DRAWS))
    if rest > 0:
        chi_square += (counts[~likely].sum() - rest) ** 2 / max(rest, 1)
    degrees = likely.sum()
    assert chi_square < degrees + 4 * np.sqrt(2 * degrees), (chi_square, degrees)


def test_logprobs_are_those_of_the_whole_vocabulary_at_the_temperature():
    tokens, logprobs = draw(Sampling.create(0.7, 0.5, 3))
    np.testing.assert_allclose(logprobs, jax.nn.log_softmax(LOGITS / 0.7)[tokens], atol=1e-5)


def test_temperature_zero_takes_the_most_likely_token():
    tokens, logprobs = draw(Sampling.create(0.0, 1.0, -1))
    assert (tokens == LOGITS.argmax()).all()
    np.testing.assert_allclose(logprobs, jax.nn.log_softmax(LOGITS).max(), atol=1e-5)


def draw_at(weights, uniform):
    """Draws from weights [B, V]."""
    blocks = jnp.pad(weights, ((0, 0), (0, -weights.shape[1] % BLOCK))).reshape(len(weights), -1, BLOCK)
    return inverse_cdf(blocks.sum(-1), lambda block: blocks[jnp.arange(len(weights)), block], uniform)


def draw_plainly(logits, keys, position, sampling, eos_ids):
    """What `sample` returns, operation by operation over [B, V], with a sort."""
    scaled = np.asarray(jnp.asarray(logits) / sampling.temperature)
    allowed = scaled.copy()
    if position < sampling.min_length:
        allowed[:, list(eos_ids)] = -np.inf
    weights = np.array(jnp.exp(allowed - allowed.max(-1, keepdims=True)))
    if sampling.greedy:
        weights[weights < 1] = 0
    if sampling.top_k > 0:
        weights[weights < np.sort(weights)[:, -sampling.top_k :][:, :1]] = 0
    if sampling.top_p < 1:
        above = np.array([[row[row > weight].sum(dtype=np.float64) for weight in row] for row in weights])
        weights[above >= sampling.top_p * weights.sum(-1, keepdims=True, dtype=np.float64)] = 0
    uniform = jnp.array([jax.random.uniform(jax.random.fold_in(key, position)) for key in keys])
    tokens = draw_at(jnp.array(weights), jnp.where(sampling.greedy, 0.0, uniform))
    return tokens, np.take_along_axis(np.asarray(jax.nn.log_softmax(scaled)), np.asarray(tokens)[:, None], 1)[:, 0]


@pytest.mark.short("128")
@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("vocabulary", [5, 128, 300])
def test_draws_are_those_of_the_plain_formula(vocabulary, ties):
    rng, rows, ends = np.random.default_rng(vocabulary), 24, (2, vocabulary - 1)
    compiled = jax.jit(lambda *arguments: sample(*arguments, ends))
    for how in itertools.product((0.0, 0.7, 1.0), (1.0, 0.8), (-1, 1, 4), (0, 3)):
        logits = rng.normal(size=(rows, vocabulary)).astype(np.float32) * 3
        logits = np.round(logits) if ties else logits
        arguments = row_keys(int(rng.integers(99)), TRAIN, jnp.arange(rows), 1), jnp.int32(2), Sampling.create(*how)
        tokens, logprobs = compiled(logits, *arguments)
        expected, expected_logprobs = draw_plainly(logits, *arguments, ends)
        np.testing.assert_array_equal(tokens, expected, str(how))
        np.testing.assert_allclose(logprobs, expected_logprobs, atol=2e-6, err_msg=str(how))
    assert compiled._cache_size() == 1


@pytest.mark.parametrize("vocabulary", [1, 5, 128, 129, 1000])
def test_entries_of_weight_zero_are_never_drawn(vocabulary):
    rng = np.random.default_rng(vocabulary)
    weights = rng.random((200, vocabulary)).astype(np.float32) * (rng.random((200, vocabulary)) < 0.3)
    weights[:, rng.integers(vocabulary)] += 0.1
    for uniform in (0.0, 0.5, np.nextafter(np.float32(1), np.float32(0))):
        tokens = draw_at(jnp.array(weights), jnp.full(200, uniform, jnp.float32))
        assert (np.take_along_axis(weights, np.asarray(tokens)[:, None], 1) > 0).all()


def test_an_address_decides_the_draw_and_the_layout_does_not():
    def uniforms(*arguments):
        return [float(jax.random.uniform(key)) for key in row_keys(*arguments)]

    both = uniforms(0, TRAIN, jnp.array([7, 9]), 3)
    assert uniforms(0, TRAIN, jnp.array([9]), 3) == both[3:]
    assert uniforms(0, TRAIN, jnp.array([9, 7]), 2) == [*both[3:5], *both[:2]]
    others = [uniforms(1, TRAIN, jnp.array([7, 9]), 3), uniforms(0, EVALUATE, jnp.array([7, 9]), 3)]
    assert len({*both, *others[0], *others[1]}) == 18


def test_positions_draw_differently():
    keys = row_keys(0, TRAIN, jnp.arange(16), 1)
    logits = jnp.zeros((16, 1000))
    first, second = (sample(logits, keys, jnp.int32(position), Sampling.create(1.0, 1.0, -1))[0] for position in (0, 1))
    assert (first != second).sum() > 14


def noise(numbers, *, seed=0, purpose=SELECT, num_samples=3, length=5):
    return np.asarray(position_noise(seed, purpose, jnp.array(numbers), num_samples, length))


def test_noise_of_a_position_depends_on_neither_the_length_nor_the_other_prompts():
    found = noise([7, 9])
    assert found.shape == (6, 5)
    np.testing.assert_array_equal(noise([7, 9], length=8)[:, :5], found)
    np.testing.assert_array_equal(noise([9, 4, 7])[[6, 7, 8, 0, 1, 2]], found)
    np.testing.assert_array_equal(noise([9], num_samples=2), found[3:5])


def test_noise_differs_by_seed_purpose_number_sample_and_position():
    several = [noise([7, 9]), noise([7, 9], seed=1), noise([7, 9], purpose=TRAIN)]
    assert len(np.unique(several)) == 3 * 6 * 5


def test_noise_is_uniform():
    drawn = noise(range(64), num_samples=8, length=32).reshape(-1)
    assert 0 <= drawn.min() and drawn.max() < 1
    counts = np.bincount((drawn * 16).astype(int), minlength=16)
    mean = len(drawn) / 16
    assert np.sum((counts - mean) ** 2 / mean) < 15 + 4 * np.sqrt(2 * 15)


def test_equal_weights_are_kept_or_dropped_together():
    logits = jnp.log(jnp.array([4.0, 2.0, 2.0, 1.0, 1.0]))
    cases = (1.0, 2, {0, 1, 2}), (0.5, -1, {0, 1, 2}), (0.4, -1, {0}), (0.81, -1, {0, 1, 2, 3, 4})
    for top_p, top_k, expected in cases:
        tokens, _ = draw(Sampling.create(1.0, top_p, top_k), logits)
        assert set(np.unique(tokens)) == expected, (top_p, top_k)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_end_of_sequence_token_is_drawn_before_the_minimum_length(temperature):
    logits = jnp.zeros((64, 6)).at[:, 4].set(9.0).at[:, 2].set(5.0)
    keys = row_keys(0, TRAIN, jnp.arange(64), 1)
    sampling = Sampling.create(temperature, 1.0, -1, min_length=3)
    for position, drawn in ((2, 2), (3, 4)):
        tokens, logprobs = sample(logits, keys, jnp.int32(position), sampling, (4, 5))
        assert np.bincount(tokens).argmax() == drawn and (position == 3 or not np.isin(tokens, (4, 5)).any())
        np.testing.assert_allclose(logprobs, jax.nn.log_softmax(logits[0])[tokens], atol=1e-5)
    for cold in (0.0, 0.01):  # where the weights would vanish next to those of forbidden tokens
        found, _ = sample(10 * logits, keys, jnp.int32(0), Sampling.create(cold, 1.0, -1, min_length=3), (4, 5))
        assert (found == 2).all()
    nothing_left = Sampling.create(1.0, 0.9, -1, min_length=3)
    assert set(np.unique(sample(logits, keys, jnp.int32(0), nothing_left, (4, 5))[0])) == {2}


def test_no_new_way_to_draw_needs_a_compilation():
    compiled = jax.jit(lambda *arguments: sample(*arguments))
    keys = row_keys(0, TRAIN, jnp.arange(2), 1)
    for arguments in ((1.0, 1.0, -1), (0.7, 0.9, 5), (0, 1, -1, 3)):
        compiled(jnp.zeros((2, 300)), keys, jnp.int32(0), Sampling.create(*arguments))
    assert compiled._cache_size() == 1
