import dataclasses

import jax
import numpy as np
import pytest
from shapes import ARCH, mesh_of
from small_policy import LENGTH, actor_settings, engine_settings

from dapo_jax.learner.actor import build_actor
from dapo_jax.models.attention import MASKED
from dapo_jax.models.transformer import logits
from dapo_jax.models.vocabulary_blocks import BLOCK, block_logits, with_whole_blocks
from dapo_jax.models.vocabulary_blocks_gpu import block_sums
from dapo_jax.preflight.hlo_costs import program_costs
from dapo_jax.rollout.lengths import LengthHistory
from dapo_jax.rollout.programs import Calls
from dapo_jax.rollout.sizes import choose_layout


def tables(vocab_size, *, tied, size=6):
    rng = np.random.default_rng(vocab_size)  # small integers: sums are exact, in whatever order a processor adds them
    names = ["embedding"] if tied else ["embedding", "head"]
    params = {name: np.float32(rng.integers(-9, 10, (vocab_size, size))) for name in names}
    return {**params, "layers": [{"query": np.zeros((size, 1, 6), np.float32)}]}


jit_block_logits, jit_logits = (jax.jit(function, static_argnums=2) for function in (block_logits, logits))


@pytest.mark.short("5-None-1-head", "300-None-3-tied", "300-2.0-0-tied")
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "head"])
@pytest.mark.parametrize("shards", [0, 1, 3])
@pytest.mark.parametrize(("vocab_size", "cap"), [(5, None), (128, None), (300, None), (300, 2.0)])
def test_logits_in_blocks_are_the_logits(vocab_size, cap, shards, tied):
    params = tables(vocab_size, tied=tied)
    padded = with_whole_blocks(params, shards) if shards else params
    hidden = np.float32(np.random.default_rng(0).integers(-9, 10, (4, 6)))
    arch = dataclasses.replace(ARCH, vocab_size=vocab_size, logit_cap=cap)
    found, expected = jit_block_logits(padded, hidden, arch), jit_logits(params, hidden, arch)
    assert found.shape[1] % max(shards, 1) == 0 and found.shape[2] == BLOCK
    np.testing.assert_array_equal(found.reshape(4, -1)[:, :vocab_size], expected)
    assert (found.reshape(4, -1)[:, vocab_size:] == -np.inf).all()


@pytest.mark.short("300-None-37-2-head")
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "head"])
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("rows", [37, 140])  # less than a tile, and more than one
@pytest.mark.parametrize(("vocab_size", "cap"), [(100, None), (300, None), (300, 2.0)])
def test_the_kernels_find_what_a_draw_needs_of_each_block_and_the_logits_of_one(vocab_size, cap, rows, shards, tied):
    params = with_whole_blocks(tables(vocab_size, tied=tied, size=128), shards)
    hidden = np.float32(np.random.default_rng(0).integers(-9, 10, (2 * rows, 128)) / 64)
    arch = dataclasses.replace(ARCH, vocab_size=vocab_size, logit_cap=cap)
    expected = np.asarray(jit_block_logits(params, hidden, arch)) / np.float32(0.7)
    chosen = np.int32(np.random.default_rng(1).integers(0, expected.shape[1], 2 * rows))

    @jax.jit
    def find(params, hidden, temperature, chosen):
        sums = block_sums(params, hidden, temperature, arch, interpret=True)
        return sums.highest, sums.totals, sums.logits_in(chosen)

    with jax.set_mesh(mesh_of((1, 2, shards))):
        found = find(params, hidden, np.float32(0.7), chosen)
    highest = np.maximum(expected.max(axis=-1), MASKED)
    np.testing.assert_allclose(found[0], highest, rtol=1e-6)
    np.testing.assert_allclose(found[1], np.exp(expected - highest[..., None]).sum(axis=-1), rtol=1e-5)
    np.testing.assert_allclose(found[2], expected[np.arange(2 * rows), chosen], rtol=1e-6)


def test_only_tables_of_tokens_get_rows_and_these_are_zero():
    params = tables(200, tied=False)
    padded = with_whole_blocks(params, 2)
    assert padded["layers"] is params["layers"]
    for name in ("embedding", "head"):
        assert padded[name].shape == (256, 6) and not padded[name][200:].any()
        np.testing.assert_array_equal(padded[name][:200], params[name])


@pytest.mark.parametrize("vocab_size", [896, 1000], ids=["seven_blocks", "broken_blocks"])
def test_logits_stay_on_their_devices(vocab_size):
    """Also where their share of the vocabulary ends within a block: the tables of decoding weights have more rows."""
    arch, mesh, rows = dataclasses.replace(ARCH, vocab_size=vocab_size, num_layers=1), mesh_of((1, 1, 2)), 64
    settings = engine_settings(mesh, arch=arch)
    actor = build_actor(actor_settings(arch=arch), mesh)
    with jax.set_mesh(mesh):
        weights = actor.decode_weights.lower(actor.trainable.state_shape.params).out_info
        layout = choose_layout(settings, None, np.dtype(np.float32), [8] * rows, 1, LengthHistory(LENGTH), 0.0)
        assert layout.slots == rows
        text = Calls(settings, weights, layout, None).lower_decode(layout.first_shape).compile().as_text()
    assert text is not None
    share = 4 * rows * vocab_size / 2  # bytes of a device's logits
    largest = max(one.bytes / one.count for one in program_costs(text, [0, 0]).collectives if one.kind == "all-gather")
    assert largest < share / 8
