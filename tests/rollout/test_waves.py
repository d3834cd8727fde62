"""Waves: what is done to rows and caches between two chunks changes no token, and sizes follow the memory."""

import dataclasses
import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rollout.small_rollouts import SAMPLES, assert_same, called, dense
from shapes import mesh_of

from dapo_jax.learner.decode_weights import unstack_layers
from dapo_jax.models.weights import cast_matrices, init_params
from dapo_jax.rollout import learnt_sizes, wave_programs, wave_walk
from dapo_jax.rollout import waves as waves_module
from dapo_jax.rollout.round_walk import walk_round
from dapo_jax.rollout.sampling import EVALUATE, TRAIN, Sampling
from dapo_jax.rollout.shapes import LengthHistory
from dapo_jax.rollout.wave_programs import layout_of_waves


def rows_of(engine):
    """Of the programs that have decoded."""
    return {shape.rows for shape in called(engine)}


@pytest.mark.short("'lookahead': 0")
@pytest.mark.parametrize(
    "changes",
    [
        {"lookahead": 0, "smallest_rows": 24},
        {"lookahead": 1, "smallest_rows": 8},
        {"lookahead": 3, "smallest_rows": 4, "chunk_length": 4},
    ],
    ids=str,
)
def test_fewer_rows_and_wider_caches_change_no_token(changes, reference):
    lengths, ended_then = reference.mask.sum(axis=1), []
    assert lengths.min() < 10 and lengths.max() == dense().length and not reference.finished.all()
    engine = dense().waves(**changes)
    on_finished = lambda rows, rollout: ended_then.append(rollout.mask[rows].sum(axis=1))  # noqa: E731
    assert_same(dense().sample(engine, on_finished=on_finished), reference)
    assert len(rows_of(engine)) >= 4 and len({shape.window for shape in called(engine)}) >= 2
    assert len(ended_then) > 5 and sorted(np.concatenate(ended_then)) == sorted(lengths)
    assert all(np.max(early) <= np.max(late) for early, late in itertools.pairwise(ended_then))


@pytest.mark.short("(2, 2, 2)")
@pytest.mark.long("(8, 1, 1)")
@pytest.mark.parametrize(
    ("shape", "rungs", "at_once", "parts"), [((2, 2, 2), 2, 1, 2), ((2, 1, 1), 4, 3, 2), ((8, 1, 1), 4, 1, 1)], ids=str
)
def test_devices_choose_their_survivors_as_the_walk_without_devices_does(
    shape, rungs, at_once, parts, monkeypatch, reference
):
    """Two waves of 8 prompts, the second one not full, each prefilled in parts."""
    prompts = dense().prompts[:14]
    monkeypatch.setattr(wave_walk, "rungs", lambda rows, smallest: list(range(rows, 0, -rows // rungs)))
    engine = dense().waves(mesh_of(shape), max_num_seqs=36, lookahead=1, chunk_length=16)
    monkeypatch.setattr(
        wave_programs, "PREFILL_BYTES", (at_once + 0.5) * wave_programs.prefill_bytes(engine.settings, 24)
    )
    monkeypatch.setattr(waves_module, "prefill_part", counted := mock.Mock(wraps=waves_module.prefill_part))
    found = dense().sample(engine, prompts=prompts, numbers=range(14))
    assert_same(found, reference, slice(14 * SAMPLES))
    assert counted.call_count == 2 * parts
    walk = walk_round(
        engine.settings,
        np.dtype(np.float32),
        found.mask.sum(axis=1).reshape(-1, SAMPLES),
        dense().prompt_lengths[:14],
        history=LengthHistory(dense().length),
        free_bytes=0.0,
    )
    assert (
        walk.waves == 2
        and len(walk.decodes) >= min(rungs, 3)
        and sorted(walk.decodes.elements()) == sorted(called(engine))
    )
    assert walk.work == found.work and walk.resizes.total() >= rungs
    assert all(0 < work.efficiency < 1 for work in walk.work.values())


def test_a_part_of_the_prompts_may_repeat_some_of_the_one_before(monkeypatch, reference):
    """16 prompts, 5 at once: the last part repeats four."""
    engine = dense().waves(smallest_rows=1000)
    monkeypatch.setattr(wave_programs, "PREFILL_BYTES", 5.5 * wave_programs.prefill_bytes(engine.settings, 24))
    monkeypatch.setattr(waves_module, "prefill_part", counted := mock.Mock(wraps=waves_module.prefill_part))
    assert_same(dense().sample(engine), reference)
    assert counted.call_count == 4


@pytest.mark.slow
def test_waves_are_as_large_as_rows_or_memory_allow_also_after_a_restart(reference):
    whole = {"smallest_rows": 1000, "chunk_length": 30}  # rows that stay
    assert_same(dense().sample(dense().waves(max_num_seqs=20, **whole)), reference)
    engine, again = (dense().waves(max_num_seqs=0, **whole) for _ in range(2))
    engine.restore({**engine.state(), "free_bytes": np.array(6e5)})
    assert_same(dense().sample(engine), reference)
    assert max(rows_of(engine)) < len(dense().prompts) * SAMPLES  # several waves
    again.restore(engine.state())
    called(engine).clear()
    dense().sample(engine)
    dense().sample(again)
    assert called(again) == called(engine)
    found, expected = again.state(), engine.state()
    assert found.keys() == expected.keys() and len(found) == 3  # one purpose
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values)


def test_short_answers_of_one_purpose_do_not_make_waves_of_another_larger():
    engine, again = (dense().waves(max_num_seqs=0) for _ in range(2))
    engine.history(EVALUATE).add(np.ones(64, np.int64))
    assert engine.history(EVALUATE).alive(1) == 0.0 and engine.history(TRAIN).alive(dense().length - 1) == 1.0
    again.restore(engine.state())
    assert again.history(EVALUATE).alive(1) == 0.0 and not again.history(TRAIN).known


def test_the_memory_for_keys_and_values_is_the_present_share_of_the_present_devices(monkeypatch):
    measured = []
    monkeypatch.setattr(learnt_sizes, "free_bytes", lambda mesh: measured.append(mesh) or 6e5)
    saved = {**dense().waves().state(), "free_bytes": np.array(6e5)}

    def rows(shape, share):
        engine = dense().waves(mesh_of(shape), max_num_seqs=0, memory_share=share)
        engine.restore(saved)
        sizes = dense().prompt_lengths, SAMPLES, engine.history(TRAIN), engine.learnt.free_memory()
        return layout_of_waves(engine.settings, np.dtype(np.float32), *sizes).num_rows

    assert rows((1, 1, 1), 0.5) < rows((1, 1, 1), 1.0) and not measured
    rows((8, 1, 1), 1.0)
    assert len(measured) == 1


def test_the_same_shapes_are_compiled_once_whatever_the_sampling():
    compiled, engine = [], dense().waves()
    limits = np.arange(len(dense().prompts) * SAMPLES) % 37 + 1  # the lengths: no response ends before

    def sample(*how):
        dense().sample(engine, limits=limits, sampling=Sampling.create(*how, min_length=99))

    for _ in range(2):
        sample(1.0, 1.0, -1)
    listen = lambda event, _seconds, **_: compiled.append(event) if "backend_compile" in event else None  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for how in ((1.0, 1.0, -1), (0.7, 0.9, 20), (0.0, 1.0, -1)):
            sample(*how)
        assert not compiled
        jax.jit(lambda x: x + len(compiled)).lower(0).compile()
        assert compiled  # the listener hears
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("lookahead", [0, 1])
def test_what_is_compiled_ahead_is_what_is_called(lookahead):
    engine = dense().waves(lookahead=lookahead)
    limits = np.where(np.arange(len(dense().prompts) * SAMPLES) % 3, 20, 70)
    for _ in range(2):
        called(engine).clear()
        engine.programs.prepared.clear()
        dense().sample(engine, limits=limits)
    assert len(set(called(engine))) > 2 and set(called(engine)) <= set(engine.programs.prepared)


def test_decoding_copies_no_cache():
    """Each cache is donated and written in place: a chunk needs less memory besides them than they take."""
    engine, arch = dense().waves(), dense().arch
    dense().sample(engine)
    shape = called(engine)[0]
    cache = 2 * arch.num_layers * shape.rows * arch.num_kv_heads * shape.window * arch.head_dim * 4
    memory = engine.programs._found[shape].result().memory_analysis()
    assert memory.alias_size_in_bytes >= cache and memory.temp_size_in_bytes < cache / 2


@pytest.mark.slow
def test_bfloat16_matrices_keep_the_shape_of_things(reference):
    arch = dense().arch
    params = jax.jit(lambda: cast_matrices(init_params(arch, 0), arch, jnp.dtype("bfloat16")))()
    coarse = dataclasses.replace(dense(), params=jax.device_get(unstack_layers(params, arch)), length=9)
    rollout = coarse.sample(coarse.waves())
    assert (rollout.responses == reference.responses[:, :9]).mean() > 0.8 and np.isfinite(rollout.logprobs).all()
