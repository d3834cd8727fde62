"""Responses that wait for tokens of an environment and return: the policy's tokens do not depend on when, or where."""

import itertools

import jax
import numpy as np
import pytest
from rollout.small_rollouts import FREE, SAMPLES, assert_all_pages_are_free, dense, queues_of
from shapes import mesh_of

from dapo_jax.rollout.responses import Request
from dapo_jax.rollout.sampling import TRAIN

TURNS = 3


def observation(row: int, turn: int) -> list[int]:
    """1 to 13 tokens, an end-of-sequence token among some of them."""
    return [5 + (7 * row + 3 * turn + i) % 40 for i in range((row + 5 * turn) % 12)] + [2 + row % 4]


def played(kind, mesh=None, *, delay=0, **changes):
    """Episodes of TURNS observations to the first 6 prompts; an answer takes `delay` chunks times a row's number."""
    engine = dense().engine(kind, mesh, **changes)
    turns, asked, clock, handed = np.zeros(6 * SAMPLES, int), {}, itertools.count(), []

    def waits(row, tokens):
        asked[row] = next(clock) + delay * (row % 5)
        return turns[row] < TURNS

    request = Request(
        dense().on(engine.settings.mesh),
        SAMPLES,
        TRAIN,
        FREE,
        prompt_lengths=dense().prompt_lengths,
        num_prompts=6,
        waits=waits,
    )
    with jax.set_mesh(engine.settings.mesh):
        on_finished = lambda rows, _: handed.extend(rows.tolist())  # noqa: E731
        pending = engine.submit(dense().prompts[:6], range(6), request, on_finished=on_finished)
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


def assert_equal(found, expected):
    for name in ("responses", "mask", "by_policy", "finished"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), name)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-5)


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


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pages", "stretches"])
def test_the_mesh_changes_no_token(kind, expected):
    assert_equal(played(kind, mesh_of((2, 2, 2)), lookahead=1, delay=2)[0], expected)


@pytest.mark.parametrize("delay", [0, 4])
def test_rows_whose_pages_are_given_up_are_read_again(delay, monkeypatch, expected):
    queues = queues_of(monkeypatch, 16)
    assert_equal(played("pages", lookahead=1, delay=delay)[0], expected)
    assert queues[0].shards[0].given_up > 5
    assert_all_pages_are_free(queues[0])


def test_rows_that_nobody_answers_are_named():
    engine = dense().engine("pages")
    sizes = {"prompt_lengths": dense().prompt_lengths, "num_prompts": 6}
    request = Request(dense().on(engine.settings.mesh), 1, TRAIN, FREE, **sizes, waits=lambda row, tokens: True)
    with jax.set_mesh(engine.settings.mesh):
        pending = engine.submit(dense().prompts[:6], range(6), request)
        with pytest.raises(RuntimeError, match=r"rows \[\d.*\] wait for tokens"):
            pending.wait()
        row, *_ = parked = pending.parked.tolist()
        with pytest.raises(ValueError, match=f"0 tokens for row {row} must be at least one"):
            pending.resume(row, [])
        for row in parked:
            pending.end(row)
        found = pending.wait()
    engine.close()
    assert found.by_policy is None and np.flatnonzero(found.finished).tolist() == parked
