"""Attention over whole sequences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.data.containers import Bins
from dapo_jax.models import attention as attention_module
from dapo_jax.models.attention import (
    PLAIN,
    XLA,
    Scores,
    attention,
    causal_attention,
    queries_at_once,
    shared_prompt_attention,
    visible_in_bins,
)


@pytest.mark.short("31")
@pytest.mark.parametrize("scores", [PLAIN, Scores(1), Scores(3), Scores(9, 0.5), Scores(40, 0.5)])
@pytest.mark.parametrize("length", [16, 17, 24, 31])
def test_blocks_of_queries_attend_like_all_at_once(length, scores, monkeypatch):
    monkeypatch.setattr(attention_module, "QUERY_BLOCK", 8)
    assert queries_at_once(length) == (16 if length == 16 else 8)
    random = np.random.default_rng(0)
    query = jnp.asarray(random.normal(size=(2, length, 4, 6)), jnp.float32)
    key, value = (jnp.asarray(random.normal(size=(2, length, 2, 6)), jnp.float32) for _ in range(2))
    mask = jnp.arange(length) >= jnp.array([[0], [5]])  # left-padded

    def total(attend):
        return lambda *arrays: jnp.sum(jnp.sin(attend(*arrays)) * mask[..., None, None])

    def at_once(query, key, value):
        distance = jnp.arange(length)[:, None] - jnp.arange(length)
        near = (distance >= 0) & (distance < (scores.window or length))
        return attention(query, key, value, mask[:, None, :] & near, scores.cap)

    def in_blocks(query, key, value):
        return causal_attention(query, key, value, mask, scores)

    np.testing.assert_allclose(in_blocks(query, key, value)[mask], at_once(query, key, value)[mask], atol=1e-6)
    found, expected = (jax.grad(total(attend), (0, 1, 2))(query, key, value) for attend in (in_blocks, at_once))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_a_block_of_queries_reads_the_keys_that_its_window_reaches(monkeypatch):
    monkeypatch.setattr(attention_module, "QUERY_BLOCK", 8)
    arrays = jnp.zeros((1, 32, 4, 6)), jnp.zeros((1, 32, 2, 6)), jnp.zeros((1, 32, 2, 6)), jnp.ones((1, 32), bool)
    plain, near, wide = (
        str(jax.make_jaxpr(lambda *arrays, scores=scores: causal_attention(*arrays, scores))(*arrays))
        for scores in (PLAIN, Scores(5), Scores(32))
    )
    assert "f32[1,2,2,8,32]" in plain and "f32[1,2,2,8,12]" in near and "f32[1,2,2,8,32]" not in near
    assert plain == wide


def test_a_soft_cap_bounds_the_scores():
    """Of one token that sees two, with scores 3 and -1, where one is capped at 2."""
    query, key = jnp.array([[[[3.0]]]]), jnp.array([[[[1.0]], [[-1 / 3]]]])
    value = jnp.array([[[[1.0]], [[0.0]]]])
    found = attention(query, key, value, jnp.ones((1, 1, 2), bool), 2.0)
    high, low = 2 * np.tanh(3 / 2), 2 * np.tanh(-1 / 2)
    np.testing.assert_allclose(found[0, 0, 0, 0], np.exp(high) / (np.exp(high) + np.exp(low)), rtol=1e-6)


def test_windows_in_bins_count_positions():
    """A prompt a b c with responses d e and f g h, and padding: f follows c."""
    bins = Bins(
        tokens=np.zeros((1, 9), np.int32),
        positions=np.array([[0, 1, 2, 3, 4, 3, 4, 5, 0]]),
        trees=np.array([[1, 1, 1, 1, 1, 1, 1, 1, 0]]),
        branches=np.array([[0, 0, 0, 1, 1, 2, 2, 2, 0]]),
    )
    seen = {
        None: "a ab abc abcd abcde abcf abcfg abcfgh",
        2: "a ab bc cd de cf fg gh",
        3: "a ab abc bcd cde bcf cfg fgh",
    }
    for window, expected in seen.items():
        visible = np.asarray(visible_in_bins(bins, window))[0, :8]
        assert ["".join("abcdefgh"[slot] for slot in np.flatnonzero(row)) for row in visible] == expected.split()
    assert XLA.pairs(bins, 2).tolist() == [81]


def test_attention_behind_a_shared_prompt_is_capped():
    """Two rows behind one prompt of three tokens, with two tokens of their own."""
    draw = np.random.default_rng(0).normal
    query, own, prompt = (
        jnp.asarray(3 * draw(size=shape), jnp.float32) for shape in ((2, 1, 4, 6), (2, 2, 2, 2, 6), (2, 1, 3, 2, 6))
    )
    real = jnp.array([[False, True, True]])
    (prompt_key, prompt_value), (key, value) = prompt, own
    found = shared_prompt_attention(
        query,
        jnp.moveaxis(key, 1, 3),
        value.swapaxes(1, 2),
        jnp.ones((1, 1, 2), bool),
        jnp.moveaxis(prompt_key, 1, 3),
        prompt_value.swapaxes(1, 2),
        real,
        0.7,
    )
    keys, values = (
        jnp.concatenate([jnp.repeat(of_prompt, 2, axis=0), of_row], axis=1)
        for of_prompt, of_row in ((prompt_key, key), (prompt_value, value))
    )
    visible = jnp.broadcast_to(jnp.array([False, True, True, True, True]), (2, 1, 5))
    np.testing.assert_allclose(found, attention(query, keys, values, visible, 0.7), atol=1e-6)
    assert np.abs(found - attention(query, keys, values, visible)).max() > 0.1
