"""How much of the work of slots is needed, on long tails and at equal lengths; and what the queue does with pages."""

from dataclasses import replace

import numpy as np
import pytest
from decoding_roofline import SAMPLES, Simulation, known, machines, slots_for
from rollout.large_models import LIMIT, SEVEN, layout_of, settings_of
from shapes import ARCH
from simulate_decoding import Prompts

from dapo_jax.models.flops import token_flops
from dapo_jax.preflight.rollout import walk_lengths
from dapo_jax.rollout.counting import Counting, Opened
from dapo_jax.rollout.layout import Layout, PrefillSize
from dapo_jax.rollout.queue import needed_work, prefill_calls
from dapo_jax.rollout.shards import Shard

# Seconds by the same roofline of the wave engine that slots replaced, for responses of so many tokens each. It decoded
# rows that began together, read a prompt's keys once for all samples, and copied survivors to smaller batches.
EQUAL = {
    ("7B v5p:2x2x4", 2048): 40.93,
    ("7B v5e:8x8", 2048): 52.73,
    ("7B h100:8", 2048): 56.97,
    ("7B h100:8", 8192): 739.28,
    ("32B v5p:4x4x8", 2048): 24.91,
    ("0.5B h100:1, 256 rows", 8192): 35.96,
    ("0.5B h100:1, 512 rows", 8192): 71.91,
    ("1.5B h100:1, 256 rows", 8192): 93.35,
    ("1.5B h100:1, 512 rows", 8192): 184.06,
}
LONG_TAIL = {  # the same of a long tail
    "7B v5p:2x2x4": 400.01,
    "7B v5e:8x8": 659.93,
    "7B h100:8": 654.05,
    "32B v5p:4x4x8": 275.15,
    "0.5B h100:1, 256 rows": 25.33,
    "0.5B h100:1, 512 rows": 40.86,
    "1.5B h100:1, 256 rows": 63.89,
    "1.5B h100:1, 512 rows": 127.35,
}
LARGE, SMALL = list(LONG_TAIL)[:4], list(LONG_TAIL)[4:]


def simulated(name: str, *, seed: int = 0, length: int | None = None) -> tuple[Simulation, float]:
    """A round of a shape, all responses of `length` tokens, None = a long tail; and its computed over needed work."""
    machine = machines()[name]
    prompts = Prompts.draw([seed, 0], 512, 1.0)
    lengths, responses = prompts.lengths[: machine.target], prompts.responses[: machine.target]
    if length:
        responses = np.full_like(responses, length)
    settings = machine.settings(prompt_limit=2048, limit=length or LIMIT)
    history = known(responses, settings.max_response_length)
    queue = Simulation(machine, slots_for(machine, settings, lengths, SAMPLES, history), settings.max_response_length)
    queue.add(lengths, responses)()
    return queue, queue.computed["decode"] / needed_work(machine.arch, lengths, responses)["decode"]


def given_up(queue: Simulation) -> int:
    return sum(shard.given_up for shard in queue.queue.shards)


@pytest.mark.slow
@pytest.mark.long("7B h100:8-0", "7B v5e:8x8-0")
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", LARGE)
def test_decoding_a_long_tail_computes_little_more_than_is_needed(name, seed):
    queue, ratio = simulated(name, seed=seed)
    assert ratio < 1.25 and given_up(queue) < 0.01 * 8192
    assert {shape.slots for shape in queue.decodes} <= {*queue.layout.ladder} and len(queue.layout.ladder) <= 4
    most = 1.15 if name == "32B v5p:4x4x8" else 0.85  # with few rows a shard, more slots are faster, and more are empty
    assert queue.seconds < most * LONG_TAIL[name] or seed


@pytest.mark.parametrize("name", SMALL)
def test_few_rows_whose_lengths_differ_much_wait_for_slots_though_all_fit_the_memory(name):
    queue, ratio = simulated(name)
    assert queue.seconds < 0.85 * LONG_TAIL[name] and ratio < 1.25
    most = 192 if name == "0.5B h100:1, 512 rows" else 96
    assert queue.layout.ladder == tuple(most // part for part in (1, 2, 4, 8))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "length"), EQUAL, ids=str)
def test_equal_lengths_take_no_longer_than_in_waves(name, length):
    queue, ratio = simulated(name, length=length)
    assert queue.seconds < 1.05 * EQUAL[name, length] and ratio < 1.15
    assert len(queue.layout.ladder) <= 2 and given_up(queue) == 0


def test_equal_lengths_that_fill_their_chunks_waste_only_keys():
    """Two prompts of 9 tokens, the last of which is not prefilled; 4 responses of 24 tokens in chunks of 8."""
    sizes = {"chunk_length": 8, "max_num_seqs": 8, "max_prompt_length": 16, "max_response_length": 24}
    prompts, flops = np.full(2, 9), token_flops(ARCH)
    layout = layout_of(settings_of(SEVEN, (1, 1), arch=ARCH, **sizes), prompts, 2, dtype=np.float32)
    [size] = layout.prefills
    assert (layout.slots, size.width, layout.row_pages) == (4, 16, 4) and size.at_once >= 2
    counted, work = walk_lengths(ARCH, layout, np.full((2, 2), 24), prompts, limit=24, lookahead=0)
    assert counted.decodes == {(4, 0): 3} and counted.prefills == {size: 1}
    keys = 4 * 8 * (1 + 2 + 3)  # of the prompt and the response so far, and a tail as long as a page
    assert work["decode"].computed == 8 * (3 * 4 * (flops.layers + flops.head) + (keys + 3 * 4 * 8) * flops.pair)
    assert work["prefill"].computed == size.at_once * 16 * (flops.layers + 16 * flops.pair)


def test_rows_of_a_prompt_lie_together_and_read_its_pages_once(monkeypatch):
    """Of each turn: every row is in one run, of one prompt, whose pages its rows' tables begin with."""
    sizes = {"chunk_length": 8, "max_num_seqs": 12, "max_prompt_length": 40, "max_response_length": 64}
    rng, turns = np.random.default_rng(0), []
    prompts, responses = rng.integers(2, 40, 9), rng.integers(1, 64, (9, 5))
    layout = layout_of(settings_of(SEVEN, (2, 1), arch=ARCH, **sizes), prompts, 5, dtype=np.float32)
    layout, decode, grant = replace(layout, together=3), Counting.decode, Shard.grant

    def in_another_order(shard):  # as after rows have returned
        granted = grant(shard)
        rng.shuffle(shard.live)
        return granted

    monkeypatch.setattr(Shard, "grant", in_another_order)
    monkeypatch.setattr(Counting, "decode", lambda self, turn: turns.append(turn) or decode(self, turn))
    walk_lengths(ARCH, layout, responses, prompts, limit=64, lookahead=0)
    assert len(turns) > 8
    for turn in turns:
        slots, seen = turn.shape.slots, 0
        for shard in range(2):
            own, found = slice(shard * slots, (shard + 1) * slots), []
            for first, length in enumerate(turn.runs[own].tolist()):
                run = turn.rows[own][first : first + length]
                assert len(run) <= 3 and len(set(run // 5)) == min(length, 1) and (run >= 0).all()
                pages = layout.prompt_pages(prompts[run[0] // 5]) if length else 0
                assert (turn.table[own][first : first + length, :pages] == turn.table[own][first, :pages]).all()
                seen, found = seen + pages, [*found, *run]
            assert sorted(found) == sorted(row for row in turn.rows[own] if row >= 0)
            assert len(set(found)) == len(found)
        assert turn.pages.runs == seen <= turn.pages.prompts
    assert any(turn.pages.runs < turn.pages.prompts for turn in turns)


@pytest.mark.parametrize(("longest", "limit", "tokens"), [(4, None, 4), (16, None, 16), (64, 8, 8), (64, None, 32)])
def test_a_chunk_is_no_longer_than_the_longest_response(longest, limit, tokens):
    settings = settings_of(SEVEN, (1, 1), arch=ARCH, chunk_length=32, max_num_seqs=8, max_response_length=longest)
    layout = layout_of(settings, [9, 9], 2, dtype=np.float32, max_tokens=limit)
    assert layout.page_length == tokens
    responses = np.full((2, 2), limit or longest)
    _, work = walk_lengths(ARCH, layout, responses, np.full(2, 9), limit=limit or longest, lookahead=0)
    assert work["decode"].efficiency > 0.5


def test_prompts_are_prefilled_in_calls_as_narrow_as_their_lengths_allow():
    """The longest of each shard first; calls of 16 tokens take two prompts of a shard, calls of 64 one."""
    sizes = {"shards": 2, "ladder": (8, 4), "chunk": 8, "pages": 99, "page_length": 8, "row_pages": 16}
    small, large = PrefillSize(16, 2), PrefillSize(64, 1)
    layout = Layout(1, **sizes, prefills=(small, large))
    pages = [(0, 5), (0, 1), (1, 2), (0, 0), (0, 2), (1, 1), (0, 1)]  # shard, and pages of each prompt
    opened = [Opened(prompt, shard, list(range(count)), [], 0) for prompt, (shard, count) in enumerate(pages)]
    calls = [(size, [one.prompt for one in prompts]) for size, prompts in prefill_calls(layout, opened)]
    assert calls == [(large, [0, 2]), (small, [4, 1, 5]), (small, [6])]


def test_long_prompts_are_prefilled_in_few_calls():
    settings, prompts = settings_of(SEVEN, (4, 4)), np.array([200] * 50 + [20000])
    layout = layout_of(settings, prompts, 1, free=86)
    counted, _ = walk_lengths(settings.arch, layout, np.full((51, 1), 70), prompts, limit=LIMIT, lookahead=1)
    # each shard has up to 13 prompts, one of which goes with the longest
    assert counted.prefills == {layout.prefills[-2]: 1, layout.prefills[0]: 12}
