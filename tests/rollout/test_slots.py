"""The slot engine: its tokens are those of the waves, whatever has a slot or a page when."""

import dataclasses
import functools
from unittest import mock

import jax
import numpy as np
import pytest
import shapes
from shapes import mesh_of, one_device_mesh
from small_policy import engine_settings

from dapo_jax.data.containers import Rollout
from dapo_jax.data.work import Work
from dapo_jax.errors import InputError
from dapo_jax.learner.decode_weights import unstack_layers
from dapo_jax.models.paged_attention import attend_gathered
from dapo_jax.models.weights import init_params
from dapo_jax.parallel.sharding import replicated
from dapo_jax.rollout import slots as slots_module
from dapo_jax.rollout.engine import Begun, GivenUp
from dapo_jax.rollout.sampling import TRAIN, Sampling
from dapo_jax.rollout.slot_queue import SlotQueue
from dapo_jax.rollout.slots import SlotEngine
from dapo_jax.rollout.waves import WaveEngine

ARCH = dataclasses.replace(shapes.ARCH, num_layers=1)
EOS, PAD, LENGTH, SAMPLES = (2, 3), 0, 60, 4
PROMPTS = [[5 + i % 50] * (1 + i * 5 % 23) for i in range(20)]
LENGTHS = np.array([len(prompt) for prompt in PROMPTS])
FREE = Sampling.create(1.0, 1.0, -1)


@functools.cache
def host_params():
    return jax.device_get(unstack_layers(jax.jit(lambda: init_params(ARCH, 0))(), ARCH))


def settings_of(mesh, **changes):
    own = {"arch": ARCH, "eos_ids": EOS, "pad_id": PAD, "max_prompt_length": 32, "max_response_length": LENGTH}
    return engine_settings(mesh, **{**own, "chunk_length": 8, **changes})


def sample(engine, *, sampling=FREE, prompts=PROMPTS, numbers=None, num_samples=SAMPLES, **options):
    mesh = engine.settings.mesh
    with jax.set_mesh(mesh):
        try:
            return engine.generate(
                jax.device_put(host_params(), replicated(mesh)),
                prompts,
                range(len(prompts)) if numbers is None else numbers,
                num_samples=num_samples,
                purpose=TRAIN,
                sampling=sampling,
                **options,
            )
        finally:
            engine.close()


def slot_engine(mesh=None, **changes):
    return SlotEngine(settings_of(mesh or one_device_mesh(), **{"max_num_seqs": 16, **changes}), attend_gathered)


@functools.cache
def waves(key=(1.0, 1.0, -1, 0), num_samples=SAMPLES):
    return sample(WaveEngine(settings_of(one_device_mesh())), sampling=Sampling.create(*key), num_samples=num_samples)


def assert_same(found, expected):
    np.testing.assert_array_equal(found.mask, expected.mask)
    np.testing.assert_array_equal(found.responses, expected.responses)
    np.testing.assert_array_equal(found.finished, expected.finished)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-5)


@pytest.mark.short("'chunk_length': 16", "'max_num_seqs': 7")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"lookahead": 1},
        {"lookahead": 3, "max_num_seqs": 7},
        {"max_num_seqs": 1000},
        {"chunk_length": 16, "lookahead": 1, "max_num_seqs": 24},
        {"chunk_length": 64},
    ],
    ids=str,
)
def test_tokens_are_those_of_waves(changes):
    assert waves().mask.sum(axis=1).min() < 8 and not waves().finished.all()
    assert_same(sample(slot_engine(**changes)), waves())


@pytest.mark.parametrize("shape", [(2, 2, 2), pytest.param((8, 1, 1), marks=pytest.mark.slow)])
def test_devices_share_the_rows(shape):
    assert_same(sample(slot_engine(mesh_of(shape), lookahead=1, max_num_seqs=24)), waves())


@pytest.mark.parametrize("key", [(0.0, 1.0, -1), (0.7, 0.9, 20), (1.0, 1.0, -1, 12)], ids=str)
def test_every_way_to_draw(key):
    """Greedy, filtered, and with a minimum length, which only some of the rows have reached."""
    assert_same(sample(slot_engine(lookahead=1), sampling=Sampling.create(*key)), waves(key))


def test_one_sample_of_a_prompt():
    assert_same(sample(slot_engine(), num_samples=1), waves(num_samples=1))


def with_pages(monkeypatch, pages):
    """Engines have so many pages a shard; returns the queues that they make."""
    queues = []

    def made(layout):
        queues.append(SlotQueue(layout))
        return queues[-1]

    def layout_of(*args, **sizes):
        return dataclasses.replace(layout_of_slots(*args, **sizes), pages=pages)

    layout_of_slots = slots_module.layout_of_slots
    monkeypatch.setattr(slots_module, "layout_of_slots", layout_of)
    monkeypatch.setattr(slots_module, "SlotQueue", made)
    return queues


@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_rows_given_up_draw_the_same_tokens_again(lookahead, monkeypatch):
    queues = with_pages(monkeypatch, 28)
    assert_same(sample(slot_engine(lookahead=lookahead)), waves())
    assert queues[0].given_up >= 10


def test_all_pages_are_free_at_the_end(monkeypatch):
    queues = with_pages(monkeypatch, 28)
    sample(slot_engine(mesh_of((2, 1, 1)), lookahead=1))
    for shard in queues[0].shards:
        assert sorted(shard.free) == list(range(1, 28)) and not shard.prompts and not shard.left


def test_too_few_pages_for_the_longest_response(monkeypatch):
    with_pages(monkeypatch, 13)
    with pytest.raises(InputError, match="must be at least 14"):
        sample(slot_engine(chunk_length=6))


def test_stop_rule_limits_and_hand_over():
    """A response ends with its 5th token if that is even; each is handed on once."""
    handed, limits = [], np.arange(1, len(PROMPTS) * SAMPLES + 1) % 40 + 1

    def stop(tokens, seen):
        return 5 if seen <= 5 <= len(tokens) and tokens[4] % 2 == 0 else None

    options = {"stop": stop, "limits": limits}
    expected = sample(WaveEngine(settings_of(one_device_mesh())), **options)
    found = sample(slot_engine(lookahead=1), **options, on_finished=lambda rows, _: handed.extend(rows.tolist()))
    assert_same(found, expected)
    assert sorted(handed) == list(range(len(limits)))
    assert not found.mask.all() and (found.mask.sum(axis=1) <= limits).all()


def added(generation, first, end, **options):
    return generation.add(PROMPTS[first:end], range(first, end), **options)


def opened(engine, **options):
    mesh = engine.settings.mesh
    return engine.open(
        jax.device_put(host_params(), replicated(mesh)),
        **{"num_samples": SAMPLES, "purpose": TRAIN, "sampling": FREE, "prompt_lengths": LENGTHS, "num_prompts": 20},
        **options,
    )


@pytest.mark.parametrize("lookahead", [0, 1])
def test_prompts_that_are_added_late_draw_the_same_tokens(lookahead, monkeypatch):
    queues, engine, handed = with_pages(monkeypatch, 60), slot_engine(lookahead=lookahead), []
    with jax.set_mesh(engine.settings.mesh):
        generation = opened(engine)
        first = added(generation, 0, 3)
        second = added(generation, 3, 12, on_finished=lambda rows, _: handed.extend(rows.tolist()))
        parts = [first()]
        assert handed, "responses to later prompts end while earlier ones are waited for"
        third = added(generation, 12, 20)
        parts = [part.replace(work={}) for part in (*parts, second(), third())]
        assert generation.close() == GivenUp(0, 0, {"prefill": Work(), "decode": Work()})
    engine.close()
    assert_same(jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts), waves())
    assert sorted(handed) == list(range(9 * SAMPLES))
    assert sorted(queues[0].shards[0].free) == list(range(1, 60))


def test_what_is_not_waited_for_is_given_up(monkeypatch):
    queues, engine = with_pages(monkeypatch, 60), slot_engine(lookahead=1)
    with jax.set_mesh(engine.settings.mesh):
        generation = opened(engine)
        first, _ = added(generation, 0, 4), added(generation, 4, 20)
        found = first()
        given_up = generation.close()
    engine.close()
    np.testing.assert_array_equal(found.responses, waves().responses[: 4 * SAMPLES])
    assert 0 < given_up.responses < 16 * SAMPLES and given_up.tokens >= given_up.responses
    assert given_up.tokens <= waves().mask[4 * SAMPLES :].sum() and given_up.work["decode"].needed == 0
    assert sorted(queues[0].shards[0].free) == list(range(1, 60))


CONTINUED = {"waves": WaveEngine, "slots": functools.partial(SlotEngine, attend_pages=attend_gathered)}


@pytest.mark.parametrize("engine", CONTINUED)
@pytest.mark.parametrize("key", [(1.0, 1.0, -1, 0), (1.0, 1.0, -1, 12)], ids=str)
def test_a_response_in_segments_is_the_same_response(engine, key):
    """Begun responses have other lengths, one of them ends at once; sample and position address the draws."""
    whole, sampling = waves(key), Sampling.create(*key)
    length = np.minimum(np.arange(len(PROMPTS) * SAMPLES) % 17 + 1, whole.mask.sum(axis=1) - 1)
    rows = np.flatnonzero(length > 0)
    kept, drawn = whole.mask & (np.arange(LENGTH) < length[:, None]), (whole.responses, whole.mask, whole.logprobs)
    parts = Rollout(*(np.where(kept, array, 0)[rows] for array in drawn), whole.finished)
    limits = np.minimum(length + 20, LENGTH)[rows]
    found = sample(
        CONTINUED[engine](settings_of(one_device_mesh(), max_num_seqs=24, lookahead=1)),
        sampling=sampling,
        prompts=[PROMPTS[row // SAMPLES] for row in rows],
        numbers=rows // SAMPLES,
        num_samples=1,
        begun=Begun(rows % SAMPLES, parts),
        limits=limits,
    )
    expected = whole.mask[rows] & (np.arange(LENGTH) < limits[:, None])
    np.testing.assert_array_equal(found.mask, expected)
    np.testing.assert_array_equal(found.responses[expected], whole.responses[rows][expected])
    np.testing.assert_allclose(found.logprobs[expected], whole.logprobs[rows][expected], atol=1e-5)
    np.testing.assert_array_equal(found.finished, whole.finished[rows] & (whole.mask.sum(axis=1)[rows] <= limits))


def test_at_most_two_programs_decode():
    engine = slot_engine()
    with mock.patch.object(engine.programs, "close"):
        sample(engine)
        once = dict(engine.programs._found)
        sample(engine, num_samples=SAMPLES)
        assert list(engine.programs._found) == list(once) and len(once) == 2
    engine.close()


def test_a_restored_engine_has_the_same_sizes():
    engine, other = slot_engine(), slot_engine()
    sample(engine)
    other.restore(engine.state())
    assert other.learnt.history(TRAIN).mean_held() == engine.learnt.history(TRAIN).mean_held() < LENGTH / 2
