import functools
import itertools
import re
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.sharding import PartitionSpec
from models.tree_bins import bins_of

from dapo_jax.models import splash, tree_attention
from dapo_jax.models.attention import PLAIN, XLA, Scores, attention, visible_in_bins
from dapo_jax.models.fused_attention import CUDNN, IMPLEMENTATIONS, SPLASH, bin_attention, on_each_device, unfit
from dapo_jax.models.remat import rematerialized
from dapo_jax.parallel.mesh import make_mesh

# Of each bin its trees, of each tree the slots of its prompt and responses; a bin has 256 slots. cuDNN takes no shared
# prompts.
TREES = {
    "shared": [
        [[5, 100, 1, 60], [30, 10]],
        [[200, 20, 20]],
        [],
        [[1, 0], [3, 4, 0, 4], [40, 180]],
        [[120, *[7] * 10], [2, 60]],
        [[128, 128]],
        [[7, 9]],
        [[64, 64, 64, 64]],
    ],
    "copies": [[[5, 100], [30, 10]], [[200, 56]], [], [[1, 0], [3, 4]], *([[i, 50], [9, i]] for i in range(1, 5))],
    "one by one": [[[n, 0]] if n else [] for n in (256, 0, 1, 128, 129, 50, 255, 7)],
}
T, N, K, H = 256, 4, 2, 24
DTYPES = {"splash": jnp.float32, "triton": jnp.float32, "cudnn": jnp.bfloat16}
TOLERANCES = {"splash": 1e-5, "triton": 1e-5, "cudnn": 0.03}
INTERPRETED = {"splash": splash.attend, "triton": tree_attention.attend}
BINS = {name: bins_of(trees, T) for name, trees in TREES.items()}


@jax.custom_vjp
def nan_gradient_on_padding(x, real):
    return x


nan_gradient_on_padding.defvjp(
    lambda x, real: (x, real), lambda real, gradient: (jnp.where(real, gradient, jnp.nan), None)
)


def careless_cudnn(
    query, key, value, *, scale, mask_type, sliding_window_length, q_seqlen, kv_seqlen, q_offsets=None, kv_offsets=None
):
    """XLA's attention in the place of cuDNN's: it leaves NaN on padding, and everywhere if a row has no keys."""
    assert mask_type == cudnn.MaskType.PADDING_CAUSAL and cudnn.check_compute_capability("99.0")
    places = jnp.arange(query.shape[1])
    if q_offsets is None:
        segments = (places < q_seqlen[:, None]).astype(jnp.int32)
        empty = jnp.any(q_seqlen == 0)
    else:
        begins, lengths = q_offsets[:, :-1, None], q_seqlen[:, :, None]
        inside = (places >= begins) & (places < begins + lengths) & (begins >= 0)
        segments = jnp.sum(inside * jnp.arange(1, inside.shape[1] + 1)[:, None], axis=1)
        empty = (
            jnp.any(~jnp.any(q_seqlen > 0, axis=1)) | jnp.any(q_seqlen == 0) | jnp.any((begins < 0) != (lengths < 0))
        )
    real = (segments > 0)[:, :, None, None]
    query, key, value = (nan_gradient_on_padding(x, real) for x in (query, key, value))
    distance = places[:, None] - places
    near = (distance >= 0) & (distance < (sliding_window_length or T))
    visible = (segments[:, :, None] == segments[:, None, :]) & near
    attended = attention(query * scale * query.shape[-1] ** 0.5, key, value, visible).astype(query.dtype)
    return jnp.where(real & ~empty, attended, jnp.nan)


@pytest.fixture(autouse=True)
def _kernels_as_far_as_a_cpu_can_run_them(monkeypatch):
    """Pallas interprets them, cuDNN's has a stand-in; a bin has two blocks of splash and four of Triton."""
    monkeypatch.setattr(cudnn, "dot_product_attention", careless_cudnn)
    monkeypatch.setattr(splash, "BLOCK", 128)
    assert tree_attention.BLOCK == 64


def arrays(dtype):
    """query, key, value and a cotangent, none of them zero on padding."""
    draw = np.random.default_rng(0).normal
    query, key, value, cotangent = (draw(size=(8, T, heads, H)).astype(np.float32) for heads in (N, K, K, N))
    return query.astype(dtype), key.astype(dtype), value.astype(dtype), cotangent


def fused(implementation, scores=PLAIN):
    """(query, key, value, bins) -> what is attended."""
    attend = CUDNN.attend
    if implementation in INTERPRETED:
        attend = on_each_device(functools.partial(INTERPRETED[implementation], interpret=True))
    return lambda query, key, value, bins: attend(bins, scores)(query, key, value)


def prepared(implementation, bins):
    return IMPLEMENTATIONS[implementation].prepare(bins)


def result_and_gradients(attend, query, key, value, cotangent, bins):
    result, pull_back = jax.vjp(lambda *operands: attend(*operands, bins), query, key, value)
    return result, *pull_back(cotangent)


@functools.partial(jax.jit, static_argnames="cap")
def attention_and_gradients(*inputs, cap):
    return result_and_gradients(lambda *operands: attention(*operands, cap), *inputs)


def check(found, kernel, trees, scores=PLAIN):
    """On real tokens the result and its gradients are those of `attention`; everywhere they are finite.

    It is computed in float32, of operands rounded to `dtype`, with a cotangent that is zero on padding.
    """
    dtype, tolerance, bins = DTYPES[kernel], TOLERANCES[kernel], BINS[trees]
    *operands, cotangent = map(np.float32, arrays(dtype))
    real, visible = bins.trees > 0, visible_in_bins(bins, scores.window)
    expected = attention_and_gradients(*operands, cotangent * real[:, :, None, None], visible, cap=scores.cap)
    assert [x.dtype for x in found] == [jnp.float32, dtype, dtype, dtype]
    for x, y in zip(found, expected, strict=True):
        assert x.shape == y.shape and np.isfinite(x).all()
        np.testing.assert_allclose(np.float32(x)[real], y[real], rtol=tolerance, atol=tolerance)


# A window may begin inside a prompt, in a branch, at a block or not; the cap is lower than many scores.
SCORES = [PLAIN, Scores(1), Scores(3), Scores(16, 1.5), Scores(128), Scores(200, 1.5), Scores(cap=1.5)]
TAKES = {  # which trees and scores each kernel takes
    "splash": lambda trees, scores: trees != "one by one" and (trees == "copies" or scores.window is None),
    "triton": lambda trees, scores: trees != "one by one",
    "cudnn": lambda trees, scores: trees != "shared" and scores.cap is None,
}
CASES = {
    f"{kernel} {trees} " + ("plain" if scores == PLAIN else f"window {scores.window} cap {scores.cap}"): arguments
    for arguments in itertools.product(TAKES, TREES, SCORES)
    for kernel, trees, scores in [arguments]
    if TAKES[kernel](trees, scores)
}


# Short: each kernel with a window, and with a cap where it takes one. Long: without any, all trees, with a window
# inside branches and one as wide as a block; a cap alone.
@pytest.mark.short("splash copies window 16 ", "triton shared window 16 ", "cudnn copies window 3 ")
@pytest.mark.long("plain", "window 3 ", "window 128 ", "shared window None cap")
@pytest.mark.parametrize("case", CASES)
def test_equals_attention_whatever_stands_on_padding(case):
    kernel, trees, scores = CASES[case]
    run = jax.jit(functools.partial(result_and_gradients, fused(kernel, scores)))
    check(run(*arrays(DTYPES[kernel]), prepared(kernel, BINS[trees])), kernel, trees, scores)


SINKS = np.array([-3.0, 0.5, 4.0, 30.0], np.float32)  # of each head: with hardly any of the weight, to nearly all


@pytest.mark.parametrize(
    ("kernel", "trees", "scores"),
    [
        ("triton", "shared", PLAIN),
        ("triton", "shared", Scores(16, 1.5)),
        ("splash", "shared", PLAIN),
        ("splash", "copies", Scores(16)),
    ],
)
def test_sinks_take_weight_and_have_gradients(kernel, trees, scores):
    """Heads on two devices; padding has no cotangent."""
    bins, visible = BINS[trees], visible_in_bins(BINS[trees], scores.window)
    *operands, cotangent = arrays(np.float32)
    operands, cotangent = (*operands, SINKS), cotangent * (bins.trees > 0)[:, :, None, None]
    attend = on_each_device(functools.partial(INTERPRETED[kernel], interpret=True))

    @jax.jit
    def found(bins, *operands):
        result, pull_back = jax.vjp(lambda *operands: attend(bins, scores)(*operands), *operands)
        return result, *pull_back(cotangent)

    @jax.jit
    def expected(*operands):
        result, pull_back = jax.vjp(
            lambda *operands: attention(*operands[:3], visible, scores.cap, operands[3]), *operands
        )
        return result, *pull_back(cotangent)

    with jax.set_mesh(make_mesh(2, 2, 2)):
        *parts, of_sinks = found(prepared(kernel, bins), *operands)
    *others, golden = expected(*operands)
    for x, y in zip(parts, others, strict=True):
        real = bins.trees > 0
        np.testing.assert_allclose(np.asarray(x)[real], np.asarray(y)[real], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(of_sinks, golden, rtol=1e-5, atol=1e-4)
    assert np.abs(golden).max() > 1


@pytest.mark.slow
@pytest.mark.long("shared", "cudnn copies")
@pytest.mark.parametrize("case", [case for case in CASES if case.endswith("plain")])
def test_equals_attention_in_one_block(case, monkeypatch):
    monkeypatch.setattr(splash, "BLOCK", 512)
    monkeypatch.setattr(tree_attention, "BLOCK", 256)
    test_equals_attention_whatever_stands_on_padding(case)


# The division is the same code for all kernels: the long lane has both ways for splash, and one for the others.
@pytest.mark.slow
@pytest.mark.long("splash shared", "triton shared plain-inside", "cudnn copies plain-inside")
@pytest.mark.parametrize("manual", [(), ("data",)], ids=["whole", "inside_a_shard_map_over_data"])
@pytest.mark.parametrize("case", [case for case in CASES if case.endswith("plain")])
def test_equals_attention_on_a_mesh(case, manual):
    kernel, trees, _ = CASES[case]
    run = functools.partial(result_and_gradients, fused(kernel))
    with jax.set_mesh(make_mesh(2, 2, 2)):
        if manual:
            rows = PartitionSpec(manual)
            run = jax.shard_map(run, in_specs=rows, out_specs=rows, axis_names=set(manual), check_vma=False)
        found = jax.jit(run)(*arrays(DTYPES[kernel]), prepared(kernel, BINS[trees]))
    check(found, kernel, trees)


@pytest.mark.short("triton")
@pytest.mark.parametrize(("kernel", "trees"), [("splash", "copies"), ("triton", "shared"), ("cudnn", "copies")])
def test_a_window_as_wide_as_a_bin_is_none(kernel, trees):
    inputs = *arrays(DTYPES[kernel]), prepared(kernel, BINS[trees])

    def program(scores):
        text = str(jax.make_jaxpr(functools.partial(result_and_gradients, fused(kernel, scores)))(*inputs))
        return re.sub(r" at 0x\w+", "", text)

    assert program(Scores(T)) == program(PLAIN) != program(Scores(1))


def test_windows_leave_fewer_pairs():
    """Against the pairs themselves."""
    bins = BINS["copies"]
    real = (bins.trees > 0)[:, :, None]
    for window in (1, 16, 129, 200):
        visible = np.asarray(visible_in_bins(bins, window)) & real
        lengths = CUDNN.prepare(bins).lengths
        empty = (lengths == 1) & (bins.trees == 0).all(axis=1)[:, None]  # an empty bin has one slot
        expected = visible.sum(axis=(1, 2)) + empty.sum(axis=1)
        assert CUDNN.pairs(CUDNN.prepare(bins), window).tolist() == expected.tolist()
        blocks = (visible | np.eye(T, dtype=bool)).reshape(8, 2, 128, 2, 128).any(axis=(2, 4))
        assert (SPLASH.pairs(SPLASH.prepare(bins), window) >= blocks.sum(axis=(1, 2)) * 128.0**2).all()
        assert XLA.pairs(bins, window).tolist() == [T * T] * 8
    full, least = (SPLASH.pairs(SPLASH.prepare(bins), window)[1] / 128**2 for window in (None, 1))
    assert full == 3 and least == 2


def test_responses_share_no_prompt_where_windows_cannot():
    def shared_width(name, **changes):
        return bin_attention(name, None, **changes).shared_width

    assert shared_width("splash") > 0 and shared_width("splash", windows=True) == 0
    assert shared_width("triton", windows=True) == shared_width("xla", windows=True) == 2**31
    assert shared_width("triton", windows=True, share_prompts=False) == 0


def test_splash_computes_the_blocks_in_which_a_token_sees_another():
    """Against the pairs themselves; and each block that it skips, it loads no keys for."""
    bins = BINS["shared"]
    found = splash.prepare(bins)
    visible = np.asarray(visible_in_bins(bins))
    shared = np.array(
        [
            np.bincount(np.unique(np.stack([t, b]), axis=1)[0], minlength=9)[t] > 2
            for t, b in zip(bins.trees, bins.branches, strict=True)
        ]
    )
    to_prompt = visible & (shared & (bins.branches > 0))[:, :, None] & (bins.branches == 0)[:, None, :]
    own = (visible & ~to_prompt).reshape(8, 2, 128, 2, 128).any(axis=(2, 4))
    np.testing.assert_array_equal(found.blocks[:, :, :2], own)
    assert found.prompt_slots.shape == (8, 256) and found.blocks.shape == (8, 2, 4)
    assert (found.blocks[:, :, 2:].any(axis=2) == to_prompt.reshape(8, 2, -1).any(axis=2)).all()
    assert splash.pairs(found).tolist() == (found.blocks.sum(axis=(1, 2)) * 128.0**2).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("size", [20, 160])
def test_heads_of_any_size_fit_the_blocks(size):
    """Heads above 128 have smaller blocks; others than powers of two are padded."""
    bins, draw = BINS["shared"], np.random.default_rng(0).normal
    query, key, value = (draw(size=(8, T, heads, size)).astype(np.float32) for heads in (N, K, K))
    found = jax.jit(fused("triton"))(query, key, value, prepared("triton", bins))
    real, expected = bins.trees > 0, jax.jit(attention)(query, key, value, visible_in_bins(bins))
    np.testing.assert_allclose(found[real], expected[real], rtol=1e-5, atol=1e-5)


def test_cudnn_has_a_length_for_every_tree_and_packs_from_hopper_on():
    lengths = CUDNN.prepare(BINS["copies"]).lengths
    assert lengths[:4].tolist() == [[105, 40], [256, 0], [1, 0], [1, 7]]  # an empty bin has one slot
    assert CUDNN.pairs(CUDNN.prepare(BINS["one by one"])).tolist()[:2] == [256 * 257 / 2, 1]

    def device(capability) -> Any:
        return cast(Any, type("Device", (), {"platform": "gpu", "device_kind": "?", "compute_capability": capability}))

    assert bin_attention("cudnn", device("9.0")).packs and not bin_attention("cudnn", device("8.0")).packs
    problems = {name: unfit(name, device("9.0"), jnp.bfloat16, 128, 50.0) for name in ("cudnn", "triton")}
    assert problems == {"cudnn": "needs scores without a soft cap, and this model caps its own", "triton": ""}
    problems = {name: unfit(name, device("9.0"), jnp.bfloat16, 64, sinks=True) for name in ("cudnn", "triton")}
    assert problems == {"cudnn": "needs attention without sinks, and this model has them", "triton": ""}


@pytest.mark.parametrize(("kernel", "least"), [("splash", 2 + 3 + 4), ("triton", 4 + 6 + 4)])
def test_products_of_float32_are_not_rounded(kernel, least):
    """A TPU multiplies in bfloat16 what has no precision, and a GPU in TF32."""
    run = functools.partial(result_and_gradients, fused(kernel))
    one_bin = jax.tree.map(lambda x: x[:1], (arrays(jnp.float32), prepared(kernel, BINS["shared"])))
    text = str(jax.make_jaxpr(run)(*one_bin[0], one_bin[1]))
    products = text.count("dot_general[")
    assert products >= least and text.count("precision=(Precision.HIGHEST") == products


@pytest.mark.parametrize(("policy", "passes"), [("full", 2), ("attention", 1)])
def test_remat_attention_does_not_run_the_kernel_again(policy, passes):
    *operands, _ = (x[:1] for x in arrays(jnp.float32))
    bins = jax.tree.map(lambda x: x[:1], prepared("splash", BINS["shared"]))
    attend = rematerialized(lambda *operands: fused("splash")(*operands, bins), policy)
    text = str(jax.make_jaxpr(jax.grad(lambda *operands: jnp.sum(attend(*operands))))(*operands))
    assert text.count("name=splash_mha_fwd") == passes and text.count("name=splash_mha_dkv") == 1
