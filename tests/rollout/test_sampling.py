import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.models.attention import MASKED
from dapo_jax.models.vocabulary_blocks import BLOCK, BlockSums
from dapo_jax.rollout import sampling as sampling_module
from dapo_jax.rollout.sampling import SELECT, TRAIN, Sampling, inverse_cdf, position_noise, row_keys

LOGITS = np.random.default_rng(0).normal(size=300).astype(np.float32) * 2
DRAWS = 20000
FREE = Sampling.create(1.0, 1.0, -1)


@functools.partial(jax.jit, static_argnums=4)
def sample_blocks(*arguments):
    return sampling_module.sample(*arguments)


def blocks_of(array, filler):
    """[B, V] as [B, n, BLOCK]."""
    missing = -array.shape[1] % BLOCK
    return np.pad(array, ((0, 0), (0, missing)), constant_values=filler).reshape(len(array), -1, BLOCK)


def sample(logits, keys, position, sampling, eos_ids=()):
    found = sample_blocks(blocks_of(logits, -np.inf), keys, np.int32(position), sampling, eos_ids)
    return [np.asarray(array) for array in found]


@functools.cache
def keys_of(rows):
    return row_keys(0, TRAIN, np.arange(rows), 1)


def log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


@pytest.mark.short("0.6")
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_samples_have_the_probabilities_of_the_model(temperature):
    tokens, _ = sample(np.tile(LOGITS, (DRAWS, 1)), keys_of(DRAWS), 3, Sampling.create(temperature, 1.0, -1))
    expected = np.exp(log_softmax(LOGITS / temperature)) * DRAWS
    counts, likely = np.bincount(tokens, minlength=len(LOGITS)), expected >= 5
    rest = expected[~likely].sum()
    chi_square = np.sum((counts[likely] - expected[likely]) ** 2 / expected[likely])
    chi_square += (counts[~likely].sum() - rest) ** 2 / rest
    assert chi_square < likely.sum() + 4 * np.sqrt(2 * likely.sum()), chi_square


@jax.jit
def draw_from_blocks(blocks, uniform, finer):
    return inverse_cdf(blocks.sum(-1), lambda block: blocks[jnp.arange(len(blocks)), block], uniform, finer)


def draw_at(weights, uniform, finer):
    """Draws from weights [B, V]."""
    uniforms = np.asarray(uniform, np.float32), np.asarray(finer, np.float32)
    return np.asarray(draw_from_blocks(blocks_of(weights, 0.0), *uniforms))


@jax.jit
def uniforms_at(keys, position):
    places = jax.vmap(lambda key: jax.random.fold_in(key, position))(keys)
    return [
        jax.vmap(jax.random.uniform)(one) for one in (places, jax.vmap(lambda key: jax.random.fold_in(key, 1))(places))
    ]


def draw_plainly(logits, keys, position, sampling, eos_ids):
    """What `sample` returns, operation by operation over [B, V], with a sort."""
    scaled = logits / sampling.temperature
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
    uniforms = np.zeros((2, len(keys))) if sampling.greedy else uniforms_at(keys, position)
    tokens = draw_at(weights, *uniforms)
    return tokens, np.take_along_axis(log_softmax(scaled), tokens[:, None], 1)[:, 0]


@pytest.mark.short("128")
@pytest.mark.long("300")
@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("vocabulary", [5, 128, 300])
def test_draws_are_those_of_the_plain_formula(vocabulary, ties):
    """Tokens, and log-probabilities of the whole vocabulary; no new way to draw needs a compilation."""
    rng, rows, ends = np.random.default_rng(vocabulary), 24, (2, vocabulary - 1)
    before = sample_blocks._cache_size()
    for how in itertools.product((0.0, 0.7, 1.0), (1.0, 0.8), (-1, 1, 4), (0, 3)):
        logits = rng.normal(size=(rows, vocabulary)).astype(np.float32) * 3
        logits = np.round(logits) if ties else logits
        keys = row_keys(int(rng.integers(99)), TRAIN, np.arange(rows), 1)
        arguments = logits, keys, 2, Sampling.create(*how), ends
        tokens, logprobs = sample(*arguments)
        expected, expected_logprobs = draw_plainly(*arguments)
        np.testing.assert_array_equal(tokens, expected, str(how))
        np.testing.assert_allclose(logprobs, expected_logprobs, atol=2e-6, err_msg=str(how))
    assert sample_blocks._cache_size() <= before + 1


def test_draws_from_the_sums_of_blocks_are_those_of_the_plain_formula():
    """The last block has no token at all, as behind a vocabulary on several devices."""
    rows, vocabulary, scaled = 24, 300, FREE.replace(temperature=np.float32(0.7))
    logits = np.random.default_rng(0).normal(size=(rows, vocabulary)).astype(np.float32) * 3
    blocks = np.pad(blocks_of(logits, -np.inf) / scaled.temperature, ((0, 0), (0, 1), (0, 0)), constant_values=-np.inf)
    highest = np.maximum(blocks.max(axis=-1), MASKED)
    totals = np.exp(blocks - highest[..., None]).sum(axis=-1)
    sums = BlockSums(highest, totals, lambda block: jnp.asarray(blocks)[np.arange(rows), block])
    draw = jax.jit(functools.partial(sampling_module.sample_of_blocks, sums))
    for position in range(20):
        tokens, logprobs = draw(keys_of(rows), np.int32(position))
        expected, expected_logprobs = draw_plainly(logits, keys_of(rows), position, scaled, ())
        np.testing.assert_array_equal(tokens, expected)
        np.testing.assert_allclose(logprobs, expected_logprobs, atol=2e-6)


def test_a_block_far_below_the_highest_logit_has_tokens_too(monkeypatch):
    """Where rounding draws such a block, the weights of its logits, by the highest of all, are 0."""
    logits = np.pad(np.full((2, 3), -110.0, np.float32), ((0, 0), (0, BLOCK - 3)), constant_values=-np.inf)
    sums = BlockSums(jnp.array([[0.0, -87.3]] * 2), jnp.array([[128.0, 3.0]] * 2), lambda _: jnp.array(logits))
    monkeypatch.setattr(sampling_module, "_uniforms", lambda keys, position: jnp.ones((2, 2)))
    tokens, logprobs = sampling_module.sample_of_blocks(sums, keys_of(2), jnp.int32(0))
    assert set(tokens.tolist()) <= {128, 129, 130} and np.isfinite(logprobs).all()


@pytest.mark.short("129")
@pytest.mark.long("1000", "5")
@pytest.mark.parametrize("vocabulary", [1, 5, 128, 129, 1000])
def test_entries_of_weight_zero_are_never_drawn(vocabulary):
    rng = np.random.default_rng(vocabulary)
    weights = rng.random((200, vocabulary)).astype(np.float32) * (rng.random((200, vocabulary)) < 0.3)
    weights[:, rng.integers(vocabulary)] += 0.1
    for uniform in (0.0, 0.5, np.nextafter(np.float32(1), np.float32(0))):
        tokens = draw_at(weights, np.full(200, uniform), np.full(200, uniform))
        assert (np.take_along_axis(weights, tokens[:, None], 1) > 0).all()


def test_unlikely_tokens_have_their_shares_wherever_they_are_in_a_block():
    """Of a policy that is sure of one token: the float32s that draw another one, with second numbers."""
    logits = np.random.default_rng(0).normal(-15.6, 1, 1024)
    logits[300] = 0
    shares = np.exp(log_softmax(logits))
    start, stop = np.ceil(2**23 * np.cumsum(shares)[[299, 300]]).astype(int)
    lattice = np.concatenate([np.arange(start), np.arange(stop, 2**23)])
    uniform = np.repeat(lattice, 10) * 2.0**-23
    weights = np.broadcast_to(np.exp(logits).astype(np.float32), (len(uniform), 1024))
    tokens = draw_at(weights, uniform, np.random.default_rng(1).random(len(uniform)))
    rest = np.delete(shares, 300) / (1 - shares[300])
    unlikely = tokens[tokens != 300]
    assert len(unlikely) > 0.99 * len(tokens) > 10_000
    assert np.mean(unlikely % 128 == 0) == pytest.approx(shares[::128].sum() / (1 - shares[300]), rel=0.2)
    nats = -np.log(np.delete(shares, 300))
    assert -np.log(shares[unlikely]).mean() == pytest.approx((rest * nats).sum(), abs=0.03)


def test_positions_draw_differently():
    first, second = (sample(np.zeros((16, 1000), np.float32), keys_of(16), place, FREE)[0] for place in (0, 1))
    assert (first != second).sum() > 14


def noise(numbers, *, seed=0, purpose=SELECT, num_samples=3, length=5):
    return np.asarray(position_noise(seed, purpose, np.array(numbers), num_samples, length))


def test_noise_of_a_position_depends_on_neither_the_length_nor_the_other_prompts():
    found = noise([7, 9])
    assert found.shape == (6, 5)
    np.testing.assert_array_equal(noise([9, 4, 7], length=8)[[6, 7, 8, 0, 1, 2], :5], found)
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
    logits = np.tile(np.log(np.array([4.0, 2.0, 2.0, 1.0, 1.0], np.float32)), (500, 1))
    cases = (1.0, 2, {0, 1, 2}), (0.5, -1, {0, 1, 2}), (0.4, -1, {0}), (0.81, -1, {0, 1, 2, 3, 4})
    for top_p, top_k, expected in cases:
        tokens, _ = sample(logits, keys_of(500), 3, Sampling.create(1.0, top_p, top_k))
        assert set(np.unique(tokens)) == expected, (top_p, top_k)


def test_no_end_of_sequence_token_is_drawn_before_the_minimum_length():
    logits = np.zeros((64, 6), np.float32)
    logits[:, 4], logits[:, 2] = 9.0, 5.0

    def drawn(logits, position, *way):
        return sample(logits, keys_of(64), position, Sampling.create(*way, min_length=3), (4, 5))

    for temperature, (position, likely) in itertools.product((0.0, 1.0), ((2, 2), (3, 4))):
        tokens, logprobs = drawn(logits, position, temperature, 1.0, -1)
        assert np.bincount(tokens).argmax() == likely and (position == 3 or not np.isin(tokens, (4, 5)).any())
        np.testing.assert_allclose(logprobs, log_softmax(logits[0])[tokens], atol=1e-5)
    for cold in (0.0, 0.01):  # where the weights would vanish next to those of forbidden tokens
        assert (drawn(10 * logits, 0, cold, 1.0, -1)[0] == 2).all()
    assert set(np.unique(drawn(logits, 0, 1.0, 0.9, -1)[0])) == {2}  # nothing would be left
