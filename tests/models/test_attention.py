"""Attention over whole sequences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.models import attention as attention_module
from dapo_jax.models.attention import attention, causal, causal_attention, queries_at_once


@pytest.mark.parametrize("length", [16, 17, 24, 31])
def test_blocks_of_queries_attend_like_all_at_once(length, monkeypatch):
    monkeypatch.setattr(attention_module, "QUERY_BLOCK", 8)
    assert queries_at_once(length) == (16 if length == 16 else 8)
    random = np.random.default_rng(0)
    query = jnp.asarray(random.normal(size=(2, length, 4, 6)), jnp.float32)
    key, value = (jnp.asarray(random.normal(size=(2, length, 2, 6)), jnp.float32) for _ in range(2))
    mask = jnp.arange(length) >= jnp.array([[0], [5]])  # left-padded

    def total(attend):
        return lambda *arrays: jnp.sum(jnp.sin(attend(*arrays)) * mask[..., None, None])

    def at_once(query, key, value):
        return attention(query, key, value, causal(length, mask))

    def in_blocks(query, key, value):
        return causal_attention(query, key, value, mask)

    np.testing.assert_allclose(in_blocks(query, key, value), at_once(query, key, value), atol=1e-6)
    found, expected = (jax.grad(total(attend), (0, 1, 2))(query, key, value) for attend in (in_blocks, at_once))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
