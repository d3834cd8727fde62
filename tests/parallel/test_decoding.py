"""Decoding on several devices: what they send each other."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from shapes import ARCH, mesh_of
from small_policy import LENGTH, actor_settings, engine_settings

from dapo_jax.learner.actor import build_actor
from dapo_jax.parallel.sharding import lookup
from dapo_jax.preflight.hlo_costs import program_costs
from dapo_jax.rollout.layout import choose_layout
from dapo_jax.rollout.lengths import LengthHistory
from dapo_jax.rollout.programs import Calls


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


def test_embeddings_in_bfloat16_are_summed_over_tensor():
    """XLA's compiler for CPUs ends the process if the sum is over a part of the mesh's axes."""
    table, tokens = jnp.arange(48, dtype=jnp.bfloat16).reshape(8, 6), jnp.array([[0, 5, 7]])
    with jax.set_mesh(mesh_of((1, 1, 2))):
        np.testing.assert_array_equal(jax.jit(lookup)(table, tokens), table[tokens])
