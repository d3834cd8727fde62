import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from dapo_jax.models import fused_attention as module
from dapo_jax.models.attention import attention, causal
from dapo_jax.models.fused_attention import fused_attention
from dapo_jax.models.remat import rematerialized
from dapo_jax.parallel.mesh import make_mesh

LENGTHS = np.array([136, 0, 1, 128, 129, 50, 135, 7], np.int32)
T, N, K, H = 136, 4, 2, 24  # two of splash's smallest blocks, the second nearly empty
REAL = np.arange(T) < LENGTHS[:, None]
DTYPES = {"splash": jnp.float32, "cudnn": jnp.bfloat16}
TOLERANCES = {"splash": 1e-5, "cudnn": 0.03}
xla_attention = jax.nn.dot_product_attention


@jax.custom_vjp
def nan_gradient_on_padding(x, real):
    return x


nan_gradient_on_padding.defvjp(
    lambda x, real: (x, real), lambda real, gradient: (jnp.where(real, gradient, jnp.nan), None)
)


def careless_kernel(query, key, value, *, query_seq_lengths, implementation, **kwargs):
    """XLA's attention in the place of cuDNN's: it leaves NaN on padding, and everywhere if a row is empty."""
    assert implementation == "cudnn"
    real = (jnp.arange(query.shape[1]) < query_seq_lengths[:, None])[:, :, None, None]
    query, key, value = (nan_gradient_on_padding(x, real) for x in (query, key, value))
    attended = xla_attention(query, key, value, query_seq_lengths=query_seq_lengths, implementation="xla", **kwargs)
    return jnp.where(real & jnp.all(query_seq_lengths > 0), attended, jnp.nan)


@pytest.fixture(params=["splash", "cudnn"])
def implementation(request, monkeypatch):
    """Both kernels as far as a CPU can run them: splash is interpreted, cuDNN's has a stand-in."""
    monkeypatch.setattr(jax.nn, "dot_product_attention", careless_kernel)
    return request.param


def arrays(dtype):
    """query, key, value, lengths and a cotangent, none of them zero on padding."""
    draw = np.random.default_rng(0).normal
    shapes = (N, H), (K, H), (K, H), (N, H)
    query, key, value, cotangent = (jnp.float32(draw(size=(len(LENGTHS), T, *shape))) for shape in shapes)
    return query.astype(dtype), key.astype(dtype), value.astype(dtype), jnp.array(LENGTHS), cotangent


def fused(implementation):
    return functools.partial(fused_attention, implementation=implementation, interpret=True)


def result_and_gradients(attend, query, key, value, lengths, cotangent):
    result, pull_back = jax.vjp(lambda *operands: attend(*operands, lengths), query, key, value)
    return result, *pull_back(cotangent)


def reference(query, key, value, lengths):
    return attention(query, key, value, causal(T, jnp.arange(T) < lengths[:, None]))


@functools.cache
def expected(dtype):
    """In float32, of operands rounded to `dtype`, with a cotangent that is zero on padding."""
    query, key, value, lengths, cotangent = arrays(dtype)
    operands = (x.astype(jnp.float32) for x in (query, key, value))
    run = jax.jit(functools.partial(result_and_gradients, reference))
    return run(*operands, lengths, cotangent * REAL[:, :, None, None])


def check(found, implementation):
    """On real tokens the result and its gradients are those of `attention`; everywhere they are finite."""
    dtype, tolerance = DTYPES[implementation], TOLERANCES[implementation]
    assert [x.dtype for x in found] == [jnp.float32, dtype, dtype, dtype]
    for x, y in zip(found, expected(dtype), strict=True):
        assert x.shape == y.shape and np.isfinite(x).all()
        np.testing.assert_allclose(x.astype(jnp.float32)[REAL], y[REAL], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("max_block", [128, 512], ids=["two_blocks", "one_block"])
def test_equals_attention_whatever_stands_on_padding(implementation, max_block, monkeypatch):
    monkeypatch.setattr(module, "MAX_BLOCK", max_block)
    run = jax.jit(functools.partial(result_and_gradients, fused(implementation)))
    check(run(*arrays(DTYPES[implementation])), implementation)


@pytest.mark.parametrize("manual", [(), ("data",)], ids=["whole", "inside_a_shard_map_over_data"])
def test_equals_attention_on_a_mesh(implementation, manual):
    run = functools.partial(result_and_gradients, fused(implementation))
    with jax.set_mesh(make_mesh(2, 2, 2)):
        if manual:
            rows = PartitionSpec(manual)
            run = jax.shard_map(run, in_specs=rows, out_specs=rows, axis_names=set(manual), check_vma=False)
        found = jax.jit(run)(*arrays(DTYPES[implementation]))
    check(found, implementation)


def test_products_of_float32_are_not_rounded():
    """A TPU multiplies in bfloat16 what has no precision."""
    *operands, lengths, cotangent = arrays(jnp.float32)
    run = functools.partial(result_and_gradients, fused("splash"))
    text = str(jax.make_jaxpr(run)(*operands, lengths, cotangent))
    products = text.count("dot_general[")
    assert products >= 2 + 3 + 4 and text.count("precision=(Precision.HIGHEST") == products


@pytest.mark.parametrize(("policy", "passes"), [("full", 2), ("attention", 1)])
def test_remat_attention_does_not_run_the_kernel_again(policy, passes):
    *operands, lengths, _ = arrays(jnp.float32)
    attend = rematerialized(lambda *operands: fused("splash")(*operands, lengths), policy)
    text = str(jax.make_jaxpr(jax.grad(lambda *operands: jnp.sum(attend(*operands))))(*operands))
    assert text.count("name=splash_mha_fwd") == passes and text.count("name=splash_mha_dkv") == 1


def test_cudnn_refuses_float32():
    query, key, value, lengths, _ = arrays(jnp.float32)
    with pytest.raises(ValueError, match="query.dtype=float32 must be bfloat16 or float16"):
        fused_attention(query, key, value, lengths, implementation="cudnn")


def test_an_unknown_implementation_is_refused():
    query, key, value, lengths, _ = arrays(jnp.float32)
    with pytest.raises(ValueError, match="implementation='flash' is unknown: choose one of cudnn, splash"):
        fused_attention(query, key, value, lengths, implementation="flash")
