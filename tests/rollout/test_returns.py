"""Responses that wait for tokens of an environment and return: the policy's tokens do not depend on when, or where."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
import small_experts
from forked import Process, options, run_together, together
from ports import free_port
from rollout.small_rollouts import FREE, GREEDY, SAMPLES, Rollouts, assert_all_pages_are_free, dense, queues_of
from rollout.test_windows import family
from shapes import mesh_of

from dapo_jax.learner.decode_weights import unstack_layers
from dapo_jax.rollout.counting import Counting
from dapo_jax.rollout.queue import needed_work
from dapo_jax.rollout.responses import Begun, Request
from dapo_jax.rollout.sampling import EVALUATE, TRAIN, Sampling

TURNS = 3


def observation(row: int, turn: int) -> list[int]:
    """1 to 13 tokens, an end-of-sequence token among some of them."""
    return [5 + (7 * row + 3 * turn + i) % 40 for i in range((row + 5 * turn) % 12)] + [2 + row % 4]


def played(
    kind, mesh=None, *, rollouts=None, sampling=FREE, purpose=TRAIN, begun=None, delay=0, fields=None, **changes
):
    """Episodes of TURNS observations to the first 6 prompts; an answer takes `delay` chunks times a row's number.

    Args:
        fields: further ones of the request.
        begun: responses to continue, and how many observations each has had.
    """
    rollouts = rollouts or dense()
    engine = rollouts.engine(kind, mesh, **changes)
    turns, asked, clock, handed = np.zeros(6 * SAMPLES, int), {}, itertools.count(), []
    prompts, numbers, samples, given = rollouts.prompts[:6], list(rollouts.numbers[:6]), SAMPLES, {}
    lengths = rollouts.prompt_lengths
    if begun is not None:
        turns[:] = begun[1]
        prompts, numbers, samples = [[one for one in of for _ in range(SAMPLES)] for of in (prompts, numbers)] + [1]
        lengths = np.array(list(map(len, prompts))) + begun[0].mask.sum(axis=1)
        given = {"begun": Begun(np.tile(np.arange(SAMPLES), 6), begun[0])}

    def waits(row, tokens):
        asked[row] = next(clock) + delay * (row % 5)
        return turns[row] < TURNS

    sizes = {"prompt_lengths": lengths, "num_prompts": len(prompts), **(fields or {})}
    request = Request(rollouts.on(engine.settings.mesh), samples, purpose, sampling, **sizes, waits=waits)
    with jax.set_mesh(engine.settings.mesh):
        on_finished = lambda rows, _: handed.extend(rows.tolist())  # noqa: E731
        pending = engine.submit(prompts, numbers, request, on_finished=on_finished, **given)
        while engine.step() or pending.parked.size:
            now = next(clock)
            for row in pending.parked.tolist():
                if asked[row] <= now:
                    answer(pending, row, turns)
        rollout = pending.wait()
    engine.close()
    assert sorted(handed) == list(range(6 * SAMPLES)), "each is handed on once"
    return rollout, turns


def answer(pending, row, turns):
    turns[row] += 1
    try:
        pending.resume(row, observation(row, turns[row]))
    except ValueError as error:
        assert "must be at least one and fewer than" in str(error)
        pending.end(row)


@pytest.fixture(scope="module")
def expected():
    rollout, turns = played("pages", max_num_seqs=1000)
    own, given = rollout.by_policy, rollout.mask & ~rollout.by_policy
    assert (turns == TURNS).any() and given.any(axis=1).sum() > 10 and not rollout.logprobs[given].any()
    assert rollout.mask.sum() == own.sum() + given.sum() and (rollout.mask.sum(axis=1) < dense().length).any()
    for row, last in enumerate(turns):
        tokens, at = rollout.responses[row].tolist(), 0
        for turn in range(1, last + 1):
            new = observation(row, turn)
            start = next((i for i in range(at, len(tokens)) if given[row, i]), None)
            if start is None:  # the last observation had no room
                assert turn == last
                break
            assert tokens[start : start + len(new)] == new and given[row, start : start + len(new)].all()
            assert tokens[start - 1] in dense().eos_ids and own[row, start - 1]
            at = start + len(new)
    return rollout


def assert_equal(found, expected, tolerance=1e-5):
    for name in ("responses", "mask", "by_policy", "finished"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), name)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=tolerance)


def test_the_policys_tokens_are_those_of_one_pass_over_the_whole_chat(expected):
    dense().assert_tokens_drawn(expected, FREE)


@pytest.mark.short("pages-{'lookahead': 1, 'delay': 3", "stretches-{'max_num_seqs': 7")
@pytest.mark.parametrize(
    "changes",
    [
        {"lookahead": 1, "delay": 3, "max_num_seqs": 7},
        {"max_num_seqs": 7},
        {"chunk_length": 4, "lookahead": 2, "max_num_seqs": 1000},
        {"chunk_length": 64, "delay": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["pages", "stretches"])
def test_slots_chunks_and_waiting_change_no_token(kind, changes, expected):
    assert_equal(played(kind, **changes)[0], expected)


def turns_of(by_policy):
    """(first token, token after the last) of each turn of the policy."""
    edges = np.flatnonzero(np.diff(by_policy.astype(int), prepend=0, append=0))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


@pytest.mark.short("pages")
@pytest.mark.parametrize("kind", ["pages", "stretches"])
def test_a_turn_that_reaches_its_limit_ends_the_response(kind, expected):
    """Nothing else changes; a turn that ends with its last token, or there by a stop string, is complete."""
    most, found_stop = 20, lambda tokens, start: tokens.index(40) + 1 if 40 in tokens[start:] else None
    for fields in ({}, {"stop": found_stop}):
        whole = played(kind, max_num_seqs=7, fields=fields)[0] if fields else expected
        found, _ = played(kind, max_num_seqs=7, fields={"turn_length": most, **fields})
        cut = later = 0
        for row, tokens in enumerate(whole.responses):
            ends = [begin + most for begin, end in turns_of(whole.by_policy[row]) if end - begin > most]
            length = min([whole.mask[row].sum(), *ends])
            np.testing.assert_array_equal(found.responses[row][:length], tokens[:length])
            assert found.mask[row].sum() == length and found.finished[row] == (whole.finished[row] and not ends)
            cut, later = cut + bool(ends), later + bool(ends and length > most)
        assert 0 < later < cut < len(whole.mask)


@pytest.mark.short("pages")
@pytest.mark.long("mosaic")
@pytest.mark.parametrize("kind", ["pages", "triton", "mosaic"])
def test_tokens_of_a_chunk_that_is_read_at_once_see_those_before_them(kind):
    """The keys of a second layer depend on what the first has attended to; a page has two chunks."""
    found, _ = played(kind, rollouts=dense(2), max_num_seqs=7, least_page=16)
    dense(2).assert_tokens_drawn(found, FREE)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pages", "stretches"])
def test_the_mesh_changes_no_token(kind, expected):
    assert_equal(played(kind, mesh_of((2, 2, 2)), lookahead=1, delay=2, least_page=16)[0], expected)


@pytest.mark.parametrize(("delay", "chunk"), [(0, 8), (4, 8), (0, 4), (4, 4)])
def test_rows_whose_pages_are_given_up_are_read_again(delay, chunk, monkeypatch, expected):
    """The tokens that are read at once are always the same, those of each answer from its begin on."""
    read, reads = Counting.read, []

    def seen(devices, size, known):
        reads.extend((one.row, one.sampled) for of_shard in known for one in of_shard)
        read(devices, size, known)

    monkeypatch.setattr(Counting, "read", seen)
    queues = queues_of(monkeypatch, 16)
    assert_equal(played("pages", lookahead=1, delay=delay, chunk_length=chunk, least_page=8)[0], expected)
    parts = set()
    for row, given in enumerate(expected.mask & ~expected.by_policy):
        for at, end in turns_of(given):
            for size in (8, chunk):  # a page, then chunks
                while end - at >= size:
                    parts.add((row, at))
                    at += size
    assert set(reads) == parts and len(reads) > len(parts) > 60 // chunk
    assert queues[0].shards[0].given_up > 5
    assert_all_pages_are_free(queues[0])


def test_rows_that_nobody_answers_are_named():
    """And what reads an answer is compiled in the background, before there is one."""
    engine = dense().engine("pages")
    sizes = {"prompt_lengths": dense().prompt_lengths, "num_prompts": 6}
    request = Request(dense().on(engine.settings.mesh), 1, TRAIN, FREE, **sizes, waits=lambda row, tokens: True)
    with jax.set_mesh(engine.settings.mesh):
        pending = engine.submit(dense().prompts[:6], range(6), request)
        layout = engine.layout(request)
        reads = {(layout, size) for size in itertools.chain(*layout.reads)}
        assert reads and reads <= set(engine.programs.prepared)
        with pytest.raises(RuntimeError, match=r"rows \[\d.*\] wait for tokens"):
            pending.wait()
        row, *_ = parked = pending.parked.tolist()
        with pytest.raises(ValueError, match=f"0 tokens for row {row} must be at least one"):
            pending.resume(row, [])
        for row in parked:
            pending.end(row)
        found = pending.wait()
        assert not engine.step(), "nothing is left to do"
    engine.close()
    assert found.by_policy is None and np.flatnonzero(found.finished).tolist() == parked


@pytest.mark.short("stretches")
@pytest.mark.parametrize("kind", ["stretches", "pages"])
@pytest.mark.parametrize(
    ("sampling", "purpose"),
    [
        (GREEDY, EVALUATE),
        (Sampling.create(0.7, 0.9, 30, min_length=9), TRAIN),
        (Sampling.create(1.0, 0.8, -1), EVALUATE),
    ],
    ids=["greedy", "limited", "nucleus"],
)
def test_other_draws_and_purposes(kind, sampling, purpose):
    found, turns = played(kind, sampling=sampling, purpose=purpose, max_num_seqs=7, lookahead=1, delay=2)
    assert turns.any() and (found.mask & ~found.by_policy).any()
    dense().assert_tokens_drawn(found, sampling, purpose=purpose)


@pytest.mark.slow
@pytest.mark.long("stretches-mistral", "gemma2")
@pytest.mark.parametrize("name", ["gemma2_softcap", "gemma3", "mistral_sliding"])
@pytest.mark.parametrize("kind", ["pages", "stretches"])
def test_layers_with_windows(kind, name):
    found, turns = played(kind, rollouts=family(name), max_num_seqs=7, lookahead=1, delay=3)
    assert turns.sum() > 20
    family(name).assert_tokens_drawn(found, FREE)


@pytest.mark.slow
@pytest.mark.short("8-16")
@pytest.mark.parametrize(("chunk", "page"), [(8, 8), (8, 16), (4, 16)])
def test_rows_that_wait_keep_the_pages_that_a_window_sees(chunk, page, monkeypatch):
    """While there are enough; a chunk may begin inside a page, and a row goes back to one that has begun a page."""
    least = 1 + (7 + 6) * (5 - page // 8)  # what 7 slots and 6 prompts need
    for window_pages in (None, least):
        queues = queues_of(monkeypatch, window_pages=window_pages)
        sizes = {"max_num_seqs": 7, "delay": 9, "chunk_length": chunk, "least_page": page}
        found, turns = played("pages", rollouts=family("gemma3"), **sizes)
        family("gemma3").assert_tokens_drawn(found, FREE)
        assert (queues[0].shards[0].given_up > 0) == (window_pages is not None) and turns.sum() > 20
        assert_all_pages_are_free(queues[0])
        assert queues[0].layout.reach == 5 - page // 8


@pytest.mark.slow
@pytest.mark.long("stretches")
@pytest.mark.parametrize("kind", ["pages", "stretches"])
def test_the_experts_of_an_environments_tokens_are_recorded(kind):
    params = jax.device_get(unstack_layers(small_experts.params(), small_experts.ARCH))
    model = small_experts.ARCH, params, small_experts.PROMPTS, small_experts.EOS
    rollouts = Rollouts(*model, length=40, width=16, numbers=small_experts.NUMBERS, tolerance=1e-4)
    choices = {"choices": small_experts.ARCH.choices}
    found, turns = played(kind, rollouts=rollouts, max_num_seqs=7, lookahead=1, delay=3, least_page=16, **choices)
    assert turns.sum() > 20
    for row in range(len(turns)):
        prompt, response = rollouts.prompts[row // SAMPLES], found.responses[row][found.mask[row]].tolist()
        chosen = small_experts.chosen_by_forward((*prompt, *response), 64)
        np.testing.assert_array_equal(found.prompt_experts[row // SAMPLES], chosen[: len(prompt)])
        np.testing.assert_array_equal(found.experts[row], chosen[len(prompt) : -1])


def cut(rollout):
    """What responses begin with, to the end of the first observation, or three tokens; and how many observations."""
    given = rollout.mask & ~rollout.by_policy
    lengths, counts = rollout.mask.sum(axis=1), []
    for row, first in enumerate(given.argmax(axis=1)):
        after = first + len(observation(row, 1)) if given[row].any() else 3
        counts.append(min(after, lengths[row] - 1))
    kept = rollout.mask & (np.arange(rollout.mask.shape[1]) < np.array(counts)[:, None])
    tokens, logprobs = (np.where(kept, array, 0) for array in (rollout.responses, rollout.logprobs))
    begun = dataclasses.replace(rollout, responses=tokens, mask=kept, logprobs=logprobs)
    return dataclasses.replace(begun, by_policy=rollout.by_policy & kept, work=None), given.any(axis=1).astype(int)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stretches", "pages"])
def test_what_another_policy_has_begun_returns_too(kind, expected):
    """With the same weights, the response is that of one call; with others, what follows is theirs."""
    begun = cut(expected)
    found, _ = played(kind, begun=begun, max_num_seqs=7, lookahead=1, delay=2)
    assert_equal(found, expected)
    new, prompts = found.mask & ~begun[0].mask, dense().prompt_lengths[:6].repeat(SAMPLES)
    sizes = prompts + begun[0].mask.sum(axis=1), new.sum(axis=1)[:, None]
    needed = needed_work(dense().arch, *sizes, int(np.sum(new & ~found.by_policy)))
    assert found.work["decode"].needed == needed["decode"]
    weights = jax.tree.map(lambda leaf: leaf * 0.8, dense().params)
    changed = dataclasses.replace(dense(), params=weights)
    found, _ = played(kind, rollouts=changed, begun=begun, max_num_seqs=7)
    kept = begun[0].mask
    np.testing.assert_array_equal(found.responses[kept], expected.responses[kept])
    np.testing.assert_array_equal(found.by_policy[kept], expected.by_policy[kept])
    assert (found.responses != expected.responses).any()
    changed.assert_tokens_drawn(dataclasses.replace(found, by_policy=found.by_policy & ~kept), FREE)


OF_PROCESSES = """
import sys
import jax, numpy as np
from dapo_jax.command.command_line import command

with command(sys.argv):
    from rollout.test_returns import played
    from shapes import mesh_of
    for kind in ("pages", "stretches"):
        found, _ = played(kind, mesh_of((1, 2, 1)), lookahead=1, delay=2)
        names = "responses", "mask", "logprobs", "finished", "by_policy"
        file = {folder!r} + f"/{{kind}}.{{jax.process_index()}}"
        np.savez(file, **{{name: getattr(found, name) for name in names}})
"""


@pytest.mark.full  # the long lane has runs of two processes, in environments/test_processes
def test_processes_that_answer_alike_draw_alike(tmp_path, expected):
    port, code = free_port(), OF_PROCESSES.format(folder=str(tmp_path))
    started = [Process(code, options(together(port, process)), {"JAX_NUM_CPU_DEVICES": "1"}) for process in range(2)]
    ended = run_together(started)
    assert [one.code for one in ended] == [0, 0], ended
    files = sorted(tmp_path.glob("*.npz"))
    assert len(files) == 4
    for file in files:
        with np.load(file) as arrays:
            assert_equal(dataclasses.replace(expected, **dict(arrays)), expected)
