"""The slot engine: its tokens are the reference, whatever has a slot or a page when."""

import dataclasses

import jax
import numpy as np
import pytest
from rollout.small_rollouts import FREE, SAMPLES, assert_all_pages_are_free, assert_same, called, dense, queues_of
from shapes import mesh_of

from dapo_jax.data.work import Work
from dapo_jax.errors import InputError
from dapo_jax.rollout.engine import GivenUp
from dapo_jax.rollout.sampling import TRAIN
from dapo_jax.rollout.shapes import LengthHistory
from dapo_jax.rollout.slot_programs import layout_of_slots
from dapo_jax.rollout.slot_queue import SlotQueue


@pytest.mark.short("{'chunk_length': 16, 'lookahead': 3")
@pytest.mark.long("64", "24")
@pytest.mark.parametrize(
    "changes",
    [
        {"chunk_length": 16, "lookahead": 3, "max_num_seqs": 7},
        {"chunk_length": 16, "lookahead": 1, "max_num_seqs": 24},
        {"lookahead": 3, "max_num_seqs": 7},
        {"chunk_length": 64},
    ],
    ids=str,
)
def test_slots_and_chunks_change_no_token(changes, reference):
    assert reference.mask.sum(axis=1).min() < 8 and not reference.finished.all()
    assert_same(dense().sample(dense().slots(**changes)), reference)


@pytest.mark.short("(1, 1, 1)-2")
@pytest.mark.long("(1, 1, 1)-0", "(2, 2, 2)-1")
@pytest.mark.parametrize(
    ("shape", "lookahead"),
    [((1, 1, 1), 0), ((1, 1, 1), 1), ((1, 1, 1), 2), ((2, 1, 1), 1), ((2, 2, 2), 1), ((8, 1, 1), 1)],
    ids=str,
)
def test_rows_given_up_draw_the_same_tokens_again(shape, lookahead, monkeypatch, reference):
    """On several devices, which share the rows, there are enough pages."""
    queues = queues_of(monkeypatch, 28)
    assert_same(dense().sample(dense().slots(mesh_of(shape), lookahead=lookahead)), reference)
    assert queues[0].given_up >= 10 or shape != (1, 1, 1)
    assert_all_pages_are_free(queues[0])


def test_too_few_pages_for_the_longest_response():
    history = LengthHistory(dense().length)
    settings = dense().settings(chunk_length=6)
    layout = layout_of_slots(settings, np.dtype(np.float32), dense().prompt_lengths, SAMPLES, history, 0.0)
    with pytest.raises(InputError, match="15 pages of 6 tokens a shard must be at least 16"):
        SlotQueue(dataclasses.replace(layout, pages=15)).add(dense().prompt_lengths, np.full(64, dense().length))


def opened(engine):
    sizes = {"prompt_lengths": dense().prompt_lengths, "num_prompts": len(dense().prompts)}
    params = dense().on(engine.settings.mesh)
    return engine.open(params, num_samples=SAMPLES, purpose=TRAIN, sampling=FREE, **sizes)


def added(generation, first, end, **options):
    return generation.add(dense().prompts[first:end], range(first, end), **options)


@pytest.mark.parametrize("lookahead", [0, 1])
def test_prompts_that_are_added_late_draw_the_same_tokens(lookahead, monkeypatch, reference):
    queues, engine, handed = queues_of(monkeypatch), dense().slots(lookahead=lookahead), []
    with jax.set_mesh(engine.settings.mesh):
        generation = opened(engine)
        first = added(generation, 0, 2)
        second = added(generation, 2, 10, on_finished=lambda rows, _: handed.extend(rows.tolist()))
        parts = [first()]
        assert handed, "responses to later prompts end while earlier ones are waited for"
        third = added(generation, 10, 16)
        parts = [part.replace(work={}) for part in (*parts, second(), third())]
        assert generation.close() == GivenUp(0, 0, {"prefill": Work(), "decode": Work()})
    engine.close()
    assert_same(jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts), reference)
    assert sorted(handed) == list(range(8 * SAMPLES))
    assert_all_pages_are_free(queues[0])


def test_what_is_not_waited_for_is_given_up(monkeypatch, reference):
    queues, engine = queues_of(monkeypatch), dense().slots(lookahead=1)
    with jax.set_mesh(engine.settings.mesh):
        generation = opened(engine)
        first, _ = added(generation, 0, 4), added(generation, 4, 16)
        found = first()
        given_up = generation.close()
    engine.close()
    assert_same(found, reference, slice(4 * SAMPLES))
    assert 0 < given_up.responses < 12 * SAMPLES and given_up.tokens >= given_up.responses
    assert given_up.tokens <= reference.mask[4 * SAMPLES :].sum() and given_up.work["decode"].needed == 0
    assert_all_pages_are_free(queues[0])


def test_at_most_two_programs_decode_and_a_restored_engine_has_the_same_sizes():
    engine, other = dense().slots(), dense().slots()
    for _ in range(2):
        dense().sample(engine)
    assert len(set(called(engine))) == 2
    other.restore(engine.state())
    assert other.learnt.history(TRAIN).mean_held() == engine.learnt.history(TRAIN).mean_held() < dense().length / 2
