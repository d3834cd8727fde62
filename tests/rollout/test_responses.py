"""Responses as they grow, also from what an earlier policy has begun."""

import dataclasses
from types import SimpleNamespace

import numpy as np

from dapo_jax.data.containers import Rollout
from dapo_jax.rollout.decoding import Chunk
from dapo_jax.rollout.responses import JoinedResponses, Responses
from dapo_jax.rollout.rows import ALIVE, ENDED, WAITS

LENGTH, EOS, PAD = 10, 2, 0


def responses(count, *, limits=None, **options):
    settings = SimpleNamespace(max_response_length=LENGTH, eos_ids=(EOS,), pad_id=PAD)
    return Responses(np.full(count, LENGTH) if limits is None else np.array(limits), settings, **options)


def chunk(*rows):
    """Tokens of each row; all of them real up to an end-of-sequence token."""
    tokens = np.array(rows, np.int32)
    ended = np.cumsum(tokens == EOS, axis=1) - (tokens == EOS)
    return Chunk(tokens, ended == 0, np.full(tokens.shape, -0.5, np.float32))


def begun(*rows):
    tokens = np.array([[*row, *[PAD] * (LENGTH - len(row))] for row in rows], np.int32)
    mask = np.arange(LENGTH) < np.array([len(row) for row in rows])[:, None]
    return Rollout(tokens, mask, np.where(mask, -1.0, 0.0).astype(np.float32), np.zeros(len(rows), bool))


def test_a_stop_string_may_begin_in_what_was_begun():
    """The rule sees the whole response, and which part of it is new."""
    seen = []

    def stop(tokens, looked_at):
        seen.append((tokens, looked_at))
        return 4 if tokens[2:4] == [7, 8] else None

    found = responses(1, begun=begun([5, 6, 7]), stop=stop)
    found.add(chunk([8, 9, 9]), np.array([0]), 0)
    assert seen == [([5, 6, 7, 8, 9, 9], 3)]
    assert (
        found.mask.sum() == 4 and found.complete.all() and found.rollout().responses[0, :5].tolist() == [5, 6, 7, 8, 0]
    )


def test_what_an_environment_wrote_before_is_not_the_policys():
    """Of a response that another policy continues: it would be trained on."""
    before = dataclasses.replace(begun([5, EOS, 7]), by_policy=np.arange(LENGTH)[None] != 2)
    found = responses(1, begun=before)
    found.add(chunk([8, EOS]), np.array([0]), 0)
    by_policy = found.rollout().by_policy
    assert by_policy is not None and np.flatnonzero(by_policy[0]).tolist() == [0, 1, 3, 4]
    assert responses(1, begun=begun([5, 6])).rollout().by_policy is None


def test_a_stop_string_ends_a_turn_once_and_none_begins_in_what_an_environment_wrote():
    def stop(tokens, looked_at):  # the tokens 7, 8 next to each other, in what is near the new ones
        near = max(looked_at - 3, 0)
        found = [end for end in range(near + 2, len(tokens) + 1) if tokens[end - 2 : end] == [7, 8]]
        return max(found[0], looked_at + 1) if found else None

    found = responses(1, stop=stop, waits=lambda row, tokens: True)
    found.add(chunk([6, 7, 8, 9]), np.array([0]), 0)
    assert found.parked.all() and found.mask.sum() == 3
    found.append(0, [7])
    found.add(chunk([8, 9, 9]), np.array([0]), 4)
    assert not found.parked.any() and found.rollout().responses[0, :7].tolist() == [6, 7, 8, 7, 8, 9, 9]
    found.add(chunk([7, 8, 9]), np.array([0]), 7)
    assert found.parked.all() and found.mask.sum() == 9


def test_joined_responses_have_the_rows_of_one_after_the_other():
    handed, joined = [], JoinedResponses()
    first, second = responses(2), responses(3, on_finished=lambda rows, _: handed.extend(rows.tolist()))
    joined.parts = {0: first, 2: second}
    joined.add(chunk([EOS, 9], [5, 6], [7, EOS]), np.array([1, 3, 4]), np.array([0, 0, 0]))
    assert first.drawn().tolist() == [0, 1] and second.drawn().tolist() == [0, 2, 2] and handed == [2]
    assert (joined.states(np.arange(-1, 5)) == ALIVE).tolist() == [False, True, False, True, True, False]
    del joined.parts[0]
    assert (joined.states(np.arange(5)) == ALIVE).tolist() == [False, False, True, True, False]


ROWS = 50


class Watched(np.ndarray):
    """Raises where a function reads all rows and tokens."""

    def __array_ufunc__(self, ufunc, method, *given, out=None, **options):
        assert (ROWS, LENGTH) not in map(np.shape, given), ufunc
        given = [np.asarray(one) for one in given]
        return getattr(ufunc, method)(*given, **({} if out is None else {"out": out}), **options)


def test_what_is_done_between_chunks_follows_the_rows_that_were_decoded_alone():
    """No array of all rows and tokens is read: these may be many, and the devices wait in episodes."""
    handed = []
    found = responses(
        ROWS,
        waits=lambda row, tokens: row == 1,
        stop=lambda tokens, seen: 4 if tokens[3:4] == [9] else None,
        on_finished=lambda rows, rollout: handed.append((rows.tolist(), rollout.by_policy is None)),
    )
    for name in ("tokens", "mask", "logprobs", "by_policy"):
        setattr(found, name, getattr(found, name).view(Watched))
    rows = np.array([1, 0, 2])
    found.add(chunk([5, EOS, 0, 0], [5, 6, 7, 8], [5, 6, 7, 9]), rows, 0)
    assert found.states(rows).tolist() == [WAITS, ALIVE, ENDED] and found.drawn()[rows].tolist() == [2, 4, 4]
    found.append(1, [7, 7, 7])
    assert found.are_given(rows, np.array([1, 1, 1]), 3).tolist() == [[False, True, True], *[[False] * 3] * 2]
    found.add(chunk([5, 6], [EOS, 0]), rows[:2], np.array([5, 4]))
    assert found.drawn()[rows].tolist() == [7, 5, 4] and handed == [([2], True), ([0], False)]
    found.add(chunk([EOS]), rows[:1], np.array([7]))
    found.end(1, complete=True)
    assert handed[2:] == [([1], False)]
    written = [[True, True, *[False] * 3, *[True] * 3, False, False]]
    np.testing.assert_array_equal(found.rollout().by_policy[1:2], written)
