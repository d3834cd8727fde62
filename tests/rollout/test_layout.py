"""Sizes that follow from lengths and memory: buckets, stretches, pages, slots; and what is known of lengths."""

import itertools

import numpy as np
import pytest
from jax.sharding import AbstractMesh
from rollout.large_models import GIB, LIMIT, SEVEN, layout_of, settings_of
from shapes import ARCH
from small_policy import engine_settings

from dapo_jax.data.padding import bucket
from dapo_jax.errors import InputError
from dapo_jax.models.paged_attention import attend_gathered
from dapo_jax.rollout.lengths import LengthHistory
from dapo_jax.rollout.sizes import WIDEST_STEP, choose_layout, prompt_width, rungs, stretches_of


def test_buckets_are_few_and_close():
    sizes = sorted({bucket(length) for length in range(1, 2000)})
    assert sizes[:8] == [4, 6, 8, 12, 16, 24, 32, 48]
    assert all(length <= bucket(length) <= max(1.5 * length, 4) for length in range(1, 2000))


def test_prompts_are_as_wide_as_a_bucket_and_short_ones_share_a_width():
    assert [prompt_width(longest, 256) for longest in (3, 64, 65, 200, 256)] == [64, 64, 96, 256, 256]


@pytest.mark.parametrize("tokens", [1, 11, 64, 99, 499, 8191])
@pytest.mark.parametrize("chunk", [1, 11, 32, 128])
def test_stretches_are_whole_chunks_up_to_a_whole_response(tokens, chunk):
    found = stretches_of(tokens, chunk)
    assert found == tuple(sorted(set(found))) and all(stretch % chunk == 0 for stretch in found)
    assert found[0] == chunk and tokens <= found[-1] < tokens + chunk
    assert all(after <= before + min(before, WIDEST_STEP) for before, after in itertools.pairwise(found))


def test_slots_become_fewer_by_halves():
    assert rungs(64, 7, least=8) == (64, 32, 16, 8) and rungs(100, 7, least=1) == (100, 50, 25, 12, 6, 3, 1)
    assert rungs(100, 2, least=8) == (100, 50) and rungs(8, 4, least=8) == (8,) and rungs(5, 3, least=8) == (5,)


def history_of(lengths, longest=256):
    history = LengthHistory(longest)
    for _ in range(60):
        history.add(np.array(lengths))
    return history


def test_the_history_says_how_much_slots_hold_and_how_equal_lengths_are():
    unknown, short, mixed = LengthHistory(8), history_of([4], 8), history_of([1, 1, 1, 5], 8)
    assert (unknown.held(), unknown.evenness()) == (8, 1)
    np.testing.assert_allclose((short.held(), short.evenness()), (4, 1), atol=1e-6)
    # at token 5 a quarter still has its first response; the others hold (1 + 1 + 1 + 15) / (1 + 1 + 1 + 5) tokens
    np.testing.assert_allclose((mixed.held(), mixed.evenness()), (0.25 * 5 + 0.75 * 18 / 8, 2 / 5), atol=1e-6)
    mixed.add(np.array([5]))
    assert mixed.evenness() == pytest.approx((0.7 * 2 + 0.3 * 5) / 5)
    again, other = LengthHistory(8), LengthHistory(9)
    again.restore(mixed.to_array())
    other.restore(mixed.to_array())
    assert again.held() == mixed.held() and other.held() == 9
    again.add(np.array([5]))  # known lengths still count
    assert again.evenness() < 1


def stretches(prompts=16, free=1.0, **changes):
    mesh = AbstractMesh((1, 2, 1), ("data", "fsdp", "tensor"))
    settings = engine_settings(mesh, **{"max_prompt_length": 32, "max_num_seqs": 0, **changes})
    history = LengthHistory(settings.max_response_length)
    return choose_layout(settings, None, np.dtype(np.float32), [20] * prompts, 4, history, free * GIB)


@pytest.mark.parametrize(("longest", "chunk"), [(12, 11), (17, 16), (34, 11), (256, 16)])
def test_chunks_of_stretches_are_equal_and_short(longest, chunk):
    assert stretches(max_response_length=longest, chunk_length=0).chunk == chunk
    assert stretches(max_response_length=longest, chunk_length=5).chunk <= 5


def test_as_many_stretches_as_fit_the_memory():
    assert stretches().ladder == rungs(32, 6, least=1) and stretches(max_num_seqs=16).slots == 8
    layout = stretches(max_response_length=256, free=2.0**-10, memory_share=0.5)
    assert 1 < layout.slots * (32 + layout.stretches[-1]) * 2 * ARCH.num_layers * 2 * 16 * 4 <= 2**19


@pytest.mark.parametrize(("longest", "chunk"), [(4, 16), (24, 32), (512, 32), (2048, 64), (LIMIT, 64)])
def test_pages_are_larger_for_long_responses(longest, chunk):
    settings = settings_of(SEVEN, (1, 1), arch=ARCH, max_response_length=longest, chunk_length=0, least_page=16)
    layout, episodes = (layout_of(settings, [9], free=1, returns=returns) for returns in (False, True))
    assert layout.page_length == episodes.page_length == layout.chunk == chunk and episodes.chunk == 4


@pytest.mark.parametrize(("prompts", "changes"), [(8, {}), (80, {}), (800, {}), (512, {"max_num_seqs": 16 * 64})])
def test_slots_and_pages_fit_the_memory(prompts, changes):
    layout, rows = layout_of(settings_of(SEVEN, (16, 4), **changes), [200] * prompts, free=11), -(-prompts // 16) * 16
    assert layout.pages * layout.page_length * 2 * 28 * 128 * 2 <= 0.85 * 11 * GIB
    assert layout.slots == (64 if changes else 32 if rows > 16 else rows)


@pytest.mark.parametrize(("response", "gathers"), [(2048, False), (32768, False), (32768, True)])
def test_what_reads_chunks_fits_too(response, gathers):
    """A TPU lists the pages of all tokens in 1 MiB; where pages are gathered, each token takes what a slot does."""
    settings = settings_of(SEVEN, (1, 1), max_response_length=response, chunk_length=0, least_page=16)
    kind = {"attend": attend_gathered} if gathers else {}
    layout = layout_of(settings, [200] * 64, free=40, returns=True, **kind)
    sizes = list(itertools.chain(*layout.reads))
    assert [size.tokens for size in sizes if size.rows == 1] == [layout.page_length, layout.chunk] == [64, 8]
    for size in sizes:
        tokens = size.tokens * size.rows
        assert 4 * tokens * layout.row_pages <= 2**19 and (not gathers or tokens <= max(layout.slots, size.tokens))


def test_gathered_pages_take_memory_too():
    settings = settings_of(SEVEN, (16, 4))
    plain, gathered = (layout_of(settings, [200] * 800, free=11, **to) for to in ({}, {"attend": attend_gathered}))
    assert gathered.pages < plain.pages - gathered.slots * 2 * (LIMIT + 256) / 64 / 28


@pytest.mark.parametrize("mesh", [1, 4, 8])
@pytest.mark.parametrize(
    ("model", "rows"), [("0.5B", 3072), ("0.5B", 512), ("0.5B", 256), ("1.5B", 512), ("1.5B", 256)]
)
def test_short_responses_all_have_slots_at_once(model, rows, mesh):
    """Eight responses of at most 512 tokens to each prompt: on an H100, and on four and eight chips of a v5e."""
    settings = settings_of(f"Qwen2.5-{model}", (mesh, 1), max_prompt_length=512, max_response_length=512)
    lengths = np.clip(200 * np.exp(0.6 * np.random.default_rng(0).normal(size=1000)), 1, 512).astype(int)
    history = LengthHistory(512)
    for _ in range(2):  # nothing is known; lengths are
        layout = layout_of(settings, [200] * (rows // 8), 8, history, free=50 if mesh == 1 else 9)
        assert layout.slots * mesh == rows
        assert layout.ladder[:2] == (rows // mesh, rows // mesh // 2) and layout.ladder[-1] >= 8
        assert len(layout.ladder) > 2 or history.evenness() == 1
        history.add(lengths)


def test_a_response_that_no_memory_holds_is_refused():
    with pytest.raises(InputError, match="data.max_response_length=20480"):
        layout_of(settings_of(SEVEN, (1, 1)), [200], free=1)


def test_long_prompts_are_prefilled_in_several_widths():
    widths = [size.width for size in layout_of(settings_of(SEVEN, (4, 4)), [20000], 1, free=86).prefills]
    assert widths[-1] == 24576 and 2048 <= widths[0] < 2048 * 9 / 8 + 64 and len(widths) == 22
    assert all(wide < 1.17 * narrow for narrow, wide in itertools.pairwise(widths))
