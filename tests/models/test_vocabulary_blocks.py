import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_policy

from dapo_jax.models.transformer import logits
from dapo_jax.models.vocabulary_blocks import BLOCK, block_logits, with_whole_blocks


def tables(vocab_size, *, tied):
    rng = np.random.default_rng(vocab_size)  # small integers: sums are exact, in whatever order a processor adds them
    names = ["embedding"] if tied else ["embedding", "head"]
    params = {name: jnp.array(rng.integers(-9, 10, (vocab_size, 6)), jnp.float32) for name in names}
    return {**params, "layers": [{"query": jnp.zeros((6, 1, 6))}]}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "head"])
@pytest.mark.parametrize("shards", [0, 1, 3])
@pytest.mark.parametrize(("vocab_size", "cap"), [(5, None), (128, None), (300, None), (300, 2.0)])
def test_logits_in_blocks_are_the_logits(vocab_size, cap, shards, tied):
    params = tables(vocab_size, tied=tied)
    padded = with_whole_blocks(params, shards) if shards else params
    hidden = jnp.array(np.random.default_rng(0).integers(-9, 10, (4, 6)), jnp.float32)
    arch = dataclasses.replace(small_policy.ARCH, vocab_size=vocab_size, logit_cap=cap)
    found, expected = (
        jax.jit(function, static_argnums=2)(weights, hidden, arch)
        for function, weights in ((block_logits, padded), (logits, params))
    )
    assert found.shape[1] % max(shards, 1) == 0 and found.shape[2] == BLOCK
    np.testing.assert_array_equal(found.reshape(4, -1)[:, :vocab_size], expected)
    assert (found.reshape(4, -1)[:, vocab_size:] == -jnp.inf).all()


def test_only_tables_of_tokens_get_rows_and_these_are_zero():
    params = tables(200, tied=False)
    padded = with_whole_blocks(params, 2)
    assert padded["layers"] is params["layers"]
    for name in ("embedding", "head"):
        assert padded[name].shape == (256, 6) and not padded[name][200:].any()
        np.testing.assert_array_equal(padded[name][:200], params[name])
