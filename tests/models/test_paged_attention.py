"""Attention to pages: the kernels in Pallas' interpreter against copies of the pages, and these against a softmax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.models import paged_attention_gpu, paged_attention_tpu
from dapo_jax.models.paged_attention import Reads, Runs, attend_gathered, most_together

KERNELS = {
    name: jax.jit(functools.partial(kernel, interpret=True), static_argnames=("window", "cap"))
    for name, kernel in (
        ("tpu", paged_attention_tpu.attend),
        ("gpu", paged_attention_gpu.attend),
        ("gpu, undivided", functools.partial(paged_attention_gpu.attend)),
    )
}
jit_gathered = jax.jit(attend_gathered, static_argnames=("window", "cap"))
PROMPTS = [0, 1, 1, 40, 40, 40, 0, 511, 64]  # tokens of each row's prompt, the same for rows of one prompt ...
OWN = [0, 0, 64, 32, 0, 96, 32, 0, 160]  # ... and of its own pages
INDEX = np.int32(4)


def case(*, groups=7, kv_heads=2, size=64, page_length=32):
    """Pages in which each row sees a prompt, at the end of its pages, and what it has drawn; and a tail."""
    rng, rows = np.random.default_rng(0), len(PROMPTS)
    prompt_pages, own_pages = (-(-np.array(tokens) // page_length) for tokens in (PROMPTS, OWN))
    unused = prompt_pages.sum() + own_pages.sum()  # a page that no row has
    pages = rng.normal(size=(unused + 1, kv_heads, page_length, 2 * size)).astype(np.float32)
    pages[unused] = 1e30
    table = np.full((rows, max(prompt_pages + own_pages) + 1), unused, np.int32)
    order, lengths = iter(rng.permutation(unused)), np.zeros(rows, np.int32)
    places = [row for row in range(rows) if not row or PROMPTS[row] != PROMPTS[row - 1]]
    for first, end in zip(places, [*places[1:], rows], strict=True):
        lengths[first] = end - first
        table[first:end, : prompt_pages[first]] = [next(order) for _ in range(prompt_pages[first])]
    for row, (begin, count) in enumerate(zip(prompt_pages, own_pages, strict=True)):
        table[row, begin : begin + count] = [next(order) for _ in range(count)]
    prompt_ends = (prompt_pages * page_length).astype(np.int32)
    starts, ends = prompt_ends - np.array(PROMPTS, np.int32), prompt_ends + np.array(OWN, np.int32)
    query = rng.normal(size=(rows, kv_heads * groups, size)).astype(np.float32)
    tail = rng.normal(size=(rows, kv_heads, page_length, 2 * size)).astype(np.float32)
    return query, pages, tail, INDEX, Reads(table, starts, ends, Runs(lengths, prompt_ends))


def seen_through(window, reads):
    """What a layer with a window reads: of each row on its own, up to the window."""
    starts = np.maximum(reads.starts, reads.ends + INDEX - window + 1).astype(np.int32)
    return reads.replace(starts=starts, runs=None)


def spoiling(call):
    """With NaN where runs write nothing, as a GPU's memory may have: the parts of rows without a prompt."""

    def spoiled(kernel, name, grid, results, arrays, *, groups, **options):
        found = call(kernel, name, grid, results, arrays, groups=groups, **options)
        if name != "paged_attention_of_runs":
            return found
        read = np.repeat(np.array(PROMPTS) > 0, groups)
        return [jnp.where(read.reshape(-1, *(1,) * (x.ndim - 3)), x, jnp.nan) for x in found]

    return spoiled


SIZES = {"groups": 7, "kv_heads": 2, "size": 64, "page_length": 32}
OTHER_SIZES = [(1, 2, 64, 32), (7, 1, 128, 64), (2, 1, 64, 128), (8, 2, 128, 32)]


# A window may begin in any page, and behind the last one. With many rows, one program reads all pages of each.
@pytest.mark.short("7-2-64-32")
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("sizes", "window", "cap"),
    [(dict(zip(SIZES, sizes, strict=True)), None, None) for sizes in OTHER_SIZES]
    + [(SIZES, *scores) for scores in ((None, None), (None, 0.7), (3, None), (40, 0.7), (64, None))],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else str(value),
)
def test_kernels_equal_copies_of_the_pages(kernel, sizes, window, cap, monkeypatch):
    monkeypatch.setattr(paged_attention_gpu, "_call", spoiling(paged_attention_gpu._call))
    if kernel == "gpu, undivided":
        monkeypatch.setattr(paged_attention_gpu, "PROGRAMS", 1)
    *arrays, reads = case(**sizes)
    if window is not None:
        reads = seen_through(window, reads)
        assert max(reads.starts - reads.ends) > 0 or window > 3
    expected = jit_gathered(*arrays, reads, window=window, cap=cap)
    found = KERNELS[kernel](*arrays, reads, window=window, cap=cap)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("window", [None, 40])
def test_kernels_take_sinks_as_copies_do(kernel, window, monkeypatch):
    """A key more of each head, with the sink as its score and no value; it counts once, however pages are divided."""
    if kernel == "gpu, undivided":
        monkeypatch.setattr(paged_attention_gpu, "PROGRAMS", 1)
    *arrays, reads = case()
    reads = reads if window is None else seen_through(window, reads)
    sink = np.linspace(-3, 30, arrays[0].shape[1], dtype=np.float32)
    expected = jit_gathered(*arrays, reads, sink, window=window)
    np.testing.assert_allclose(KERNELS[kernel](*arrays, reads, sink, window=window), expected, rtol=1e-5, atol=1e-5)
    assert np.abs(expected[:, -1]).max() < 1e-4 < np.abs(expected[:, 0]).max()


@pytest.mark.parametrize("kernel", ["tpu", "gpu"])
@pytest.mark.parametrize("copies", [6, 19])
def test_runs_read_their_prompt_once_and_no_others(copies, kernel):
    """Rows of one prompt, more than a run may have; nothing is read of what a run does not begin with."""
    *(query, pages, tail, index), reads = case(groups=8)
    most, row = most_together(8, 2), PROMPTS.index(40)
    query, tail = (np.tile(x[row : row + 1], (copies, *(1,) * (x.ndim - 1))) for x in (query, tail))
    query *= 1 + np.arange(copies, dtype=np.float32)[:, None, None] / copies
    places = np.arange(copies, dtype=np.int32)
    lengths = np.where(places % most, 0, np.minimum(copies - places, most))
    table = np.tile(reads.table[row], (copies, 1))
    starts, ends, prompt_ends = (np.full(copies, x[row]) for x in (reads.starts, reads.ends, reads.runs.ends))
    runs = Runs(lengths, prompt_ends)
    expected = jit_gathered(query, pages, tail, index, Reads(table, starts, ends))
    own = table.copy()
    own[places % most > 0, : prompt_ends[0] // 32] = len(pages) - 1  # a page of 1e30
    found = KERNELS[kernel](query, pages, tail, index, Reads(own, starts, ends, runs))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_the_tpu_kernel_takes_fewer_tokens_at_once_of_large_pages(monkeypatch):
    of_a_row = 4 * 2 * 16 * (256 + 128)  # its parts of the softmax
    monkeypatch.setattr(paged_attention_tpu, "BUFFER", 2**19 + of_a_row)
    *arrays, reads = jax.tree.map(jnp.asarray, case(groups=1, size=256))
    for number, runs in ((2, None), (1, reads.runs)):  # pages, twice; the parts of a run take memory too
        given = *arrays, reads.replace(runs=runs)
        assert f"[2,{number},2,32,512]" in str(jax.make_jaxpr(paged_attention_tpu.attend)(*given))
        found = paged_attention_tpu.attend(*given, interpret=True)
        np.testing.assert_allclose(found, jit_gathered(*given), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("window", "cap"), [(None, None), (None, 0.7), (3, None), (5, None), (20, 0.7), (600, 0.7)])
def test_pages_and_tail_are_one_softmax(window, cap):
    query, pages, tail, index, reads = case()
    reads = reads if window is None else seen_through(window, reads)
    found = np.asarray(jit_gathered(query, pages, tail, index, reads, window=window, cap=cap))
    for row in range(len(query)):
        seen = np.concatenate([pages[page] for page in reads.table[row]], axis=1)[
            :, reads.starts[row] : reads.ends[row]
        ]
        seen = np.concatenate([seen, tail[row, :, : index + 1]], axis=1)[:, -(window or 0) :]
        for head in range(14):
            scores = seen[head // 7, :, :64] @ query[row, head] / 8
            scores = scores if cap is None else cap * np.tanh(scores / cap)
            weights = np.exp(scores - scores.max())
            expected = weights @ seen[head // 7, :, 64:] / weights.sum()
            np.testing.assert_allclose(found[row, head], expected, rtol=1e-5, atol=1e-5)
