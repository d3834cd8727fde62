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
    visible_in_bins,
)

jit_attention = jax.jit(attention, static_argnums=4)


# Each window and cap with one length, and each length with one window and cap.
@pytest.mark.short("31-window None", "31-window 9")
@pytest.mark.long("31", "window 9")
@pytest.mark.parametrize(
    "scores",
    [PLAIN, Scores(1), Scores(3), Scores(9, 0.5), Scores(40, 0.5)],
    ids=lambda scores: f"window {scores.window}",
)
@pytest.mark.parametrize("length", [16, 17, 24, 31])
def test_blocks_of_queries_attend_like_all_at_once(length, scores, monkeypatch):
    monkeypatch.setattr(attention_module, "QUERY_BLOCK", 8)
    assert queries_at_once(length) == (16 if length == 16 else 8)
    normal = np.random.default_rng(0).normal
    arrays = [normal(size=(2, length, heads, 6)).astype(np.float32) for heads in (4, 2, 2)]
    mask = np.arange(length) >= np.array([[0], [5]])  # left-padded

    def at_once(query, key, value):
        distance = jnp.arange(length)[:, None] - jnp.arange(length)
        near = (distance >= 0) & (distance < (scores.window or length))
        return attention(query, key, value, mask[:, None, :] & near, scores.cap)

    def in_blocks(query, key, value):
        return causal_attention(query, key, value, mask, scores)

    def with_gradients(attend):
        def total(*arrays):
            result = attend(*arrays)
            return jnp.sum(jnp.sin(result) * mask[..., None, None]), result

        gradients, result = jax.jit(jax.grad(total, (0, 1, 2), has_aux=True))(*arrays)
        return result[mask], gradients

    (found, gradients), (expected, expected_gradients) = with_gradients(in_blocks), with_gradients(at_once)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    for one, other in zip(gradients, expected_gradients, strict=True):
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
    query, key, value = np.float32([[[[3]]]]), np.float32([[[[1]], [[-1 / 3]]]]), np.float32([[[[1]], [[0]]]])
    found = jit_attention(query, key, value, np.ones((1, 1, 2), bool), 2.0)
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
