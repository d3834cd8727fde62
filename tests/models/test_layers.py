import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_policy
from jax.sharding import AbstractDevice, AbstractMesh
from jaxprs import equations

from dapo_jax.data.containers import Bins
from dapo_jax.models import layers, lora
from dapo_jax.models.architecture import Layer
from dapo_jax.models.attention import XLA, attention, causal
from dapo_jax.models.layers import _feed_forward, block, layer_weights, rotary, rotary_frequencies, rotate
from dapo_jax.models.rope_scaling import Llama3RopeScaling
from dapo_jax.models.transformer import forward, forward_bins
from dapo_jax.models.weights import cast_matrices, init_params

ARCH = dataclasses.replace(small_policy.ARCH, num_layers=3, head_dim=24)
NO_ROTARY = Layer(rotary=False)
jit_forward = jax.jit(forward, static_argnums=4)
jit_bins = jax.jit(functools.partial(forward_bins, kernel=XLA), static_argnums=2)


@functools.cache
def params():
    """They are the same for all patterns."""
    return jax.jit(init_params, static_argnums=0)(ARCH, 0)


def of_pattern(*pattern):
    return dataclasses.replace(ARCH, pattern=pattern)


@pytest.mark.short("some")
@pytest.mark.parametrize("pattern", [(Layer(),), (NO_ROTARY,), (Layer(), NO_ROTARY)], ids=["all", "none", "some"])
def test_packed_rows_have_the_hidden_states_of_rows_on_their_own(pattern):
    arch = of_pattern(*pattern)
    tokens = np.random.default_rng(0).integers(0, ARCH.vocab_size, (2, 6), np.int32)
    positions, mask = np.broadcast_to(np.arange(6, dtype=np.int32), (2, 6)), np.ones((2, 6), bool)
    expected = jit_forward(params(), tokens, positions, mask, arch)
    one_bin = Bins(
        tokens=tokens.reshape(1, -1),
        positions=positions.reshape(1, -1),
        trees=np.repeat([[1, 2]], 6, axis=1),
        branches=np.array([[0, 0, 1, 1, 1, 1, 0, 0, 2, 2, 2, 2]]),
    )
    packed, _ = jit_bins(params(), one_bin, arch)
    np.testing.assert_allclose(packed.reshape(expected.shape), expected, atol=1e-5)


def test_llama3_scaling_follows_the_formula():
    arch = dataclasses.replace(ARCH, head_dim=8, rope_theta=1e4)
    np.testing.assert_allclose(rotary_frequencies(arch), [1, 0.1, 0.01, 0.001], rtol=1e-6)
    # Over 100 positions the four frequencies make 15.915, 1.5915, 0.15915 and 0.015915 turns. More than 4:
    # unchanged. Fewer than 1: divided by 8. Between: (1.59155 - 1) / (4 - 1) = 0.197183 of the way, that is
    # 0.1 * (0.197183 + 0.802817 / 8) = 0.0297535.
    scaled = dataclasses.replace(arch, rope_scaling=Llama3RopeScaling(8.0, 1.0, 4.0, 100))
    np.testing.assert_allclose(rotary_frequencies(scaled), [1, 0.0297535, 0.00125, 0.000125], rtol=1e-5)


def test_rotation_pairs_the_halves_and_keeps_only_relative_positions():
    quarter = (np.zeros((1, 1, 1)), np.ones((1, 1, 1)))  # cosine and sine of a quarter turn
    assert rotate(np.array([[[[2.0, 3.0]]]]), quarter).tolist() == [[[[-3.0, 2.0]]]]
    query, key = np.random.default_rng(0).normal(size=(2, 1, 1, 1, ARCH.head_dim)).astype(np.float32)

    @jax.jit
    def products(query_positions, key_positions):
        query_rotation, key_rotation = (rotary(x[None], ARCH)[None] for x in (query_positions, key_positions))
        return jnp.sum(rotate(query, query_rotation) * rotate(key, key_rotation), axis=(0, 2, 3))

    found = np.asarray(products(np.array([9, 105, 4]), np.array([4, 100, 9])))
    assert found[0] == pytest.approx(found[1], abs=1e-4) and found[0] != pytest.approx(found[2], abs=1e-2)


@pytest.mark.parametrize(
    ("platform", "tensor", "dtype", "narrow", "wide"),
    [
        ("gpu", 1, "bfloat16", 15, 13),
        ("gpu", 2, "bfloat16", 0, 27),
        ("cpu", 1, "bfloat16", 0, 27),
        ("gpu", 1, "float32", 0, 28),
    ],
)
def test_projections_of_a_layer_write_bfloat16_on_gpus_and_all_else_is_float32(platform, tensor, dtype, narrow, wide):
    """Seven products forward and seven cotangents; attention's six and the gradients of seven matrices are wide.

    On GPUs the last product is traced once more for its derivative; compilers drop it.
    """
    x, mask = np.zeros((2, 6, ARCH.hidden_size), np.float32), np.ones((2, 6), bool)
    layer = layer_weights(cast_matrices(params(), ARCH, jnp.dtype(dtype))["layers"], ARCH)[0]

    def attend(query, key, value, sink):
        return attention(query, key, value, causal(6, mask)), None

    def result(x, layer):
        return block(Layer(), x, layer, rotary(np.arange(6)[None], ARCH), attend, ARCH)[0]

    device = AbstractDevice(device_kind="any", num_cores=None, platform=platform)
    mesh = AbstractMesh((1, 1, tensor), ("data", "fsdp", "tensor"), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.make_jaxpr(lambda *given: jax.vjp(result, *given)[1](given[0]))(x, layer)
        assert jax.eval_shape(result, x, layer).dtype == jnp.float32
    found = collections.Counter(
        (one.primitive.name, one.outvars[0].aval.dtype.name) for one, _ in equations(traced.jaxpr)
    )
    products = {kind: found["dot_general", kind] for kind in ("bfloat16", "float32")}
    assert products == {"bfloat16": narrow, "float32": wide}
    assert found["rsqrt", "float32"] == 2 and found["rsqrt", "bfloat16"] == 0


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("more", ["", "adapters", "biases"])
def test_the_feed_forward_network_of_gpus_is_that_of_others(activation, more, monkeypatch):
    """Its backward pass is written by hand; in float32 nothing is rounded on the way."""
    rng = np.random.default_rng(0)
    shapes = {"gate": (8, 12), "up": (8, 12), "down": (12, 8)}
    if more == "adapters":
        shapes |= {"down_lora_a": (12, 2), "down_lora_b": (2, 8), "up_lora_a": (8, 2), "up_lora_b": (2, 12)}
    elif more == "biases":
        shapes |= {"gate_bias": (12,), "down_bias": (8,)}
    layer = {name: rng.normal(scale=0.3, size=shape).astype(np.float32) for name, shape in shapes.items()}
    x, weights = (rng.normal(size=(2, 5, 8)).astype(np.float32) for _ in range(2))
    arch = dataclasses.replace(ARCH, activation=activation)

    def gradients():
        return jax.jit(jax.grad(lambda *given: jnp.sum(weights * _feed_forward(*given, arch)), argnums=(0, 1)))(
            x, layer
        )

    expected = gradients()
    for module in (layers, lora):
        monkeypatch.setattr(module, "writes_narrow", lambda: True)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), gradients(), expected)
