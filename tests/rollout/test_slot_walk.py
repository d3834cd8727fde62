"""How much of the work of slots is needed, when responses are long-tailed; and what the queue does with pages."""

import itertools

import numpy as np
import pytest
from rollout.long_tail import GIB, LIMIT, MODELS, SEVEN, long_tailed, settings_of
from shapes import ARCH

from dapo_jax.errors import InputError
from dapo_jax.models.flops import token_flops
from dapo_jax.rollout.shapes import LengthHistory
from dapo_jax.rollout.slot_programs import layout_of_slots
from dapo_jax.rollout.slot_queue import Opened, PrefillSize, SlotLayout, prefill_calls
from dapo_jax.rollout.slot_walk import walk_slots


def layout_of(settings, prompts, num_samples=16, history=None, free=0.0, dtype=np.float16):
    history = history or LengthHistory(settings.max_response_length)
    return layout_of_slots(settings, np.dtype(dtype), prompts, num_samples, history, free * GIB)


@pytest.mark.slow
@pytest.mark.long("-0")
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("model", MODELS)
def test_decoding_a_long_tail_computes_little_more_than_is_needed(model, seed):
    name, mesh, free = MODELS[model]
    settings, (responses, prompts, history) = settings_of(name, mesh), long_tailed(seed)
    layout = layout_of(settings, prompts, history=history, free=free)
    walk, work = walk_slots(settings.arch, layout, responses, prompts, limit=LIMIT, lookahead=1)
    assert 1 / work["decode"].efficiency < 1.25
    assert len(walk.decodes) <= 2 and set(walk.decodes) <= {layout.slots, layout.few_slots}
    assert walk.queue.given_up < 0.01 * 8192


def test_equal_lengths_that_fill_their_chunks_waste_only_keys():
    """Two prompts of 9 tokens, the last of which is not prefilled; 4 responses of 24 tokens in chunks of 8."""
    sizes = {"chunk_length": 8, "max_num_seqs": 8, "max_prompt_length": 16, "max_response_length": 24}
    prompts, flops = np.full(2, 9), token_flops(ARCH)
    layout = layout_of(settings_of(SEVEN, (1, 1), arch=ARCH, **sizes), prompts, 2, dtype=np.float32)
    [size] = layout.prefills
    assert (layout.slots, size.width, layout.row_pages) == (4, 16, 4) and size.at_once >= 2
    walk, work = walk_slots(ARCH, layout, np.full((2, 2), 24), prompts, limit=24, lookahead=0)
    assert walk.decodes == {4: 3} and walk.prefills == {size: 1}
    keys = 4 * 8 * (1 + 2 + 3)  # of the prompt and the response so far, and a tail as long as a page
    assert work["decode"].computed == 8 * (3 * 4 * (flops.layers + flops.head) + (keys + 3 * 4 * 8) * flops.pair)
    assert work["prefill"].computed == size.at_once * 16 * (flops.layers + 16 * flops.pair)


@pytest.mark.parametrize(("longest", "limit", "tokens"), [(4, None, 4), (16, None, 16), (64, 8, 8), (64, None, 32)])
def test_a_chunk_is_no_longer_than_the_longest_response(longest, limit, tokens):
    settings = settings_of(SEVEN, (1, 1), arch=ARCH, chunk_length=32, max_num_seqs=8, max_response_length=longest)
    history = LengthHistory(longest)
    layout = layout_of_slots(settings, np.dtype(np.float32), [9, 9], 2, history, 0.0, max_tokens=limit)
    assert layout.page_length == tokens
    responses = np.full((2, 2), limit or longest)
    _, work = walk_slots(ARCH, layout, responses, np.full(2, 9), limit=limit or longest, lookahead=0)
    assert work["decode"].efficiency > 0.5


def test_a_response_that_no_memory_holds_is_refused():
    with pytest.raises(InputError, match="data.max_response_length=20480"):
        layout_of(settings_of(SEVEN, (1, 1)), [200], free=1)


@pytest.mark.parametrize(("prompts", "changes"), [(8, {}), (80, {}), (800, {}), (512, {"max_num_seqs": 16 * 64})])
def test_slots_and_pages_fit_the_memory(prompts, changes):
    layout = layout_of(settings_of(SEVEN, (16, 4), **changes), [200] * prompts, free=11)
    assert layout.pages * layout.page_length * 2 * 28 * 128 * 2 <= 0.85 * 11 * GIB
    assert layout.few_slots <= layout.slots <= -(-prompts // 16) * 16
    assert layout.slots == 64 or not changes


def test_prompts_are_prefilled_in_calls_as_narrow_as_their_lengths_allow():
    """The longest of each shard first; calls of 16 tokens take two prompts of a shard, calls of 64 one."""
    sizes = {"shards": 2, "slots": 8, "few_slots": 4, "pages": 99, "page_length": 8, "row_pages": 16}
    small, large = PrefillSize(16, 2), PrefillSize(64, 1)
    layout = SlotLayout(1, **sizes, prefills=(small, large))
    pages = [(0, 5), (0, 1), (1, 2), (0, 0), (0, 2), (1, 1), (0, 1)]  # shard, and pages of each prompt
    opened = [Opened(prompt, shard, list(range(count)), []) for prompt, (shard, count) in enumerate(pages)]
    calls = [(size, [one.prompt for one in prompts]) for size, prompts in prefill_calls(layout, opened)]
    assert calls == [(large, [0, 2]), (small, [4, 1, 5]), (small, [6])]


def test_long_prompts_are_prefilled_in_several_widths():
    settings = settings_of(SEVEN, (4, 4))
    prompts = np.array([200] * 50 + [20000])
    layout = layout_of(settings, prompts, 1, free=86)
    widths = [size.width for size in layout.prefills]
    assert widths[-1] == 24576 and 2048 <= widths[0] < 2048 * 9 / 8 + 64 and len(widths) == 22
    assert all(wide < 1.17 * narrow for narrow, wide in itertools.pairwise(widths))
    walk, _ = walk_slots(settings.arch, layout, np.full((51, 1), 70), prompts, limit=LIMIT, lookahead=1)
    # each shard has up to 13 prompts, one of which goes with the longest
    assert walk.prefills == {layout.prefills[-2]: 1, layout.prefills[0]: 12}
