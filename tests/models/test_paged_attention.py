"""Attention to pages: the kernels in Pallas' interpreter against copies of the pages, and these against a softmax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.models import paged_attention_gpu, paged_attention_tpu
from dapo_jax.models.paged_attention import attend_gathered, attend_tail, merged

KERNELS = {
    name: jax.jit(functools.partial(kernel, interpret=True), static_argnames="cap")
    for name, kernel in (("tpu", paged_attention_tpu.attend), ("gpu", paged_attention_gpu.attend))
}
jit_gathered = jax.jit(attend_gathered, static_argnames="cap")
jit_tail = jax.jit(attend_tail, static_argnums=(3, 4))
LENGTHS = [0, 1, 200, 37, 0, 511, 64]  # tokens of each row in its pages; some rows are without


def case(*, groups=7, kv_heads=2, size=64, page_length=32):
    """Pages in which each row sees so many tokens, at their end; the last two rows share their first pages."""
    rng, rows = np.random.default_rng(0), len(LENGTHS)
    counts = [-(-length // page_length) for length in LENGTHS]
    unused = sum(counts)  # a page that no row has
    pages = rng.normal(size=(unused + 1, kv_heads, page_length, 2 * size)).astype(np.float32)
    pages[unused] = 1e30
    table = np.full((rows, max(counts) + 1), unused, np.int32)
    order = iter(rng.permutation(unused))
    for row, count in enumerate(counts):
        table[row, :count] = [next(order) for _ in range(count)]
    table[-1, : counts[-1]] = table[-2, : counts[-1]]
    ends = np.array([count * page_length for count in counts], np.int32)
    starts = ends - np.array(LENGTHS, np.int32)
    ends[5] -= 1  # a row that has not filled its last page
    query = rng.normal(size=(rows, kv_heads * groups, size)).astype(np.float32)
    return query, pages, table, starts, ends


def assert_same_parts(found, expected):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), found, expected)


SIZES = {"groups": 7, "kv_heads": 2, "size": 64, "page_length": 32}
OTHER_SIZES = [(1, 2, 64, 32), (7, 1, 128, 64), (2, 1, 64, 128), (8, 2, 128, 32)]


# A window may begin in any page, and behind the last one.
@pytest.mark.short("7-2-64-32")
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("sizes", "window", "cap"),
    [(dict(zip(SIZES, sizes, strict=True)), None, None) for sizes in OTHER_SIZES]
    + [(SIZES, *scores) for scores in ((None, None), (None, 0.7), (3, None), (40, 0.7), (64, None))],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else str(value),
)
def test_kernels_equal_copies_of_the_pages(kernel, sizes, window, cap):
    query, pages, table, starts, ends = case(**sizes)
    if window is not None:
        starts = np.maximum(starts, ends - window + np.arange(len(LENGTHS), dtype=np.int32))
        assert max(starts - ends) > 0 or window > 3
    arrays = query, pages, table, starts, ends
    expected = jit_gathered(*arrays, cap=cap)
    assert (np.asarray(expected.total == 0).all(axis=1) == (starts >= ends)).all()
    assert_same_parts(KERNELS[kernel](*arrays, cap=cap), expected)


@pytest.mark.slow
def test_the_tpu_kernel_takes_fewer_tokens_at_once_of_large_pages(monkeypatch):
    monkeypatch.setattr(paged_attention_tpu, "BUFFER", 2**19)
    arrays = tuple(map(jnp.asarray, case(groups=1, size=256)))
    assert "[2,2,2,32,512]" in str(jax.make_jaxpr(paged_attention_tpu.attend)(*arrays))  # two pages, twice
    assert_same_parts(paged_attention_tpu.attend(*arrays, interpret=True), jit_gathered(*arrays))


@pytest.mark.parametrize(("window", "cap"), [(None, None), (None, 0.7), (3, None), (5, None), (20, 0.7), (600, 0.7)])
def test_pages_and_tail_are_one_softmax(window, cap):
    query, pages, table, starts, ends = case()
    if window is not None:
        starts = np.maximum(starts, ends + np.int32(5 - window))
    tail = np.random.default_rng(1).normal(size=(len(query), 2, 32, 128)).astype(np.float32)
    paged = jit_gathered(query, pages, table, starts, ends, cap=cap)
    found = np.asarray(jax.jit(merged)(paged, jit_tail(query, tail, np.int32(4), window, cap)))
    for row in range(len(query)):
        seen = np.concatenate([pages[page] for page in table[row]], axis=1)[:, starts[row] : ends[row]]
        seen = np.concatenate([seen, tail[row, :, :5]], axis=1)[:, -(window or 0) :]
        for head in range(14):
            scores = seen[head // 7, :, :64] @ query[row, head] / 8
            scores = scores if cap is None else cap * np.tanh(scores / cap)
            weights = np.exp(scores - scores.max())
            expected = weights @ seen[head // 7, :, 64:] / weights.sum()
            np.testing.assert_allclose(found[row, head], expected, rtol=1e-5, atol=1e-5)
