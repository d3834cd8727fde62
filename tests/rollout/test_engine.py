"""The engine draws the tokens of the reference, whatever has a slot, a page or a stretch when."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rollout.recorded import CASES, RECORDED, WAYS, rollouts_of, sampled
from rollout.small_rollouts import (
    FREE,
    PAD,
    SAMPLES,
    assert_all_pages_are_free,
    assert_same,
    called,
    dense,
    queues_of,
)
from shapes import ARCH, mesh_of, one_device_mesh
from small_policy import engine_settings

from dapo_jax.data.containers import Rollout
from dapo_jax.data.work import Work
from dapo_jax.errors import InputError
from dapo_jax.learner.decode_weights import unstack_layers
from dapo_jax.models import paged_attention_gpu, paged_attention_tpu
from dapo_jax.models.paged_attention import attend_gathered
from dapo_jax.models.weights import cast_matrices, init_params
from dapo_jax.parallel import devices as devices_module
from dapo_jax.preflight.rollout import walk_lengths
from dapo_jax.rollout import engine as engine_module
from dapo_jax.rollout.engine import GivenUp
from dapo_jax.rollout.queue import Queue
from dapo_jax.rollout.responses import Begun, Request
from dapo_jax.rollout.sampling import EVALUATE, TRAIN, Sampling
from dapo_jax.run import sampler as sampler_module
from dapo_jax.run.sampler import build_engine, page_attention

KINDS = ("pages", "stretches")


@pytest.mark.parametrize(
    ("device", "size", "length", "kernel"),
    [
        ("cpu", 20, 7, None),
        ("old gpu", 64, 32, attend_gathered),
        ("tpu", 64, 48, paged_attention_tpu.attend),
        ("tpu", 192, 16, paged_attention_tpu.attend),
        ("tpu", 96, 32, attend_gathered),
        ("tpu", 128, 8, attend_gathered),
        ("gpu", 64, 32, paged_attention_gpu.attend),
        ("gpu", 96, 32, attend_gathered),
        ("gpu", 128, 48, attend_gathered),
    ],
)
def test_attention_to_pages_fits_the_devices_or_gathers_and_says_so(device, size, length, kernel, monkeypatch, caplog):
    monkeypatch.setattr(sampler_module, "platform", lambda mesh: device)
    for module in (sampler_module, devices_module):
        monkeypatch.setattr(module, "cuda_generation", lambda _: {"gpu": 8, "old gpu": 7}.get(device))
    arch = dataclasses.replace(ARCH, head_dim=size)
    settings = engine_settings(one_device_mesh(), arch=arch, chunk_length=length)
    engine = build_engine(settings)
    assert engine.attend is page_attention(settings)[0] is kernel
    needed = "capability 8.0, not 7" if device == "old gpu" else f"not {size} and {length}"
    assert [needed in line for line in caplog.messages] == [True] * (kernel is attend_gathered)


@pytest.mark.short("pages-free", "stretches-free", "stretches-begun", "stretches-eight devices")
@pytest.mark.long("stretches", "pages-filtered", "pages-long", "pages-begun", "pages-gemma2_softcap")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_that_an_earlier_engine_has_recorded(kind, case):
    """Every way to draw is also that of one pass over each sequence; only some rows have reached the minimum length."""
    expected, found = np.load(RECORDED)[case], sampled(kind, case)
    np.testing.assert_array_equal(np.where(found.mask, found.responses + 1, 0), expected)
    assert len(expected) == len(rollouts_of(case).prompts) * (1 if case == "one sample" else SAMPLES)
    if case in WAYS:
        dense().assert_drawn(found, Sampling.create(*WAYS[case]))


@pytest.mark.slow
@pytest.mark.long("eight devices")
@pytest.mark.parametrize("kind", ["triton", "mosaic"])
@pytest.mark.parametrize("case", ["free", "eight devices", "gemma2_softcap", "one sample"])
def test_kernels_that_read_a_prompt_once_draw_the_recorded_tokens(case, kind):
    """Rows of a prompt lie together, in whatever order they began; some layers have a window."""
    expected, found = np.load(RECORDED)[case], sampled(kind, case)
    np.testing.assert_array_equal(np.where(found.mask, found.responses + 1, 0), expected)


@pytest.mark.short("pages-{'chunk_length': 16, 'lookahead': 3", "pages-{'chunk_length': 4", "stretches-{'lookahead': 3")
@pytest.mark.long("pages-{'chunk_length': 64", "stretches-{'chunk_length': 16, 'lookahead': 3")
@pytest.mark.parametrize(
    "changes",
    [
        {"chunk_length": 16, "lookahead": 3, "max_num_seqs": 7},
        {"chunk_length": 16, "lookahead": 1, "max_num_seqs": 24},
        {"lookahead": 3, "max_num_seqs": 7},
        {"chunk_length": 64, "max_num_seqs": 1000},
        {"chunk_length": 4, "least_page": 16, "lookahead": 1, "max_num_seqs": 7},  # a page has four chunks
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", KINDS)
def test_slots_and_chunks_change_no_token(kind, changes, reference):
    assert reference.mask.sum(axis=1).min() < 8 and not reference.finished.all()
    assert_same(dense().sample(dense().engine(kind, **changes)), reference)


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
    assert_same(dense().sample(dense().engine("pages", mesh_of(shape), lookahead=lookahead)), reference)
    assert queues[0].shards[0].given_up >= 10 or shape != (1, 1, 1)
    assert_all_pages_are_free(queues[0])


@pytest.mark.short("(2, 2, 2)")
@pytest.mark.parametrize("shape", [(2, 1, 1), (2, 2, 2), (8, 1, 1)], ids=str)
def test_devices_do_what_the_walk_without_devices_does(shape, reference):
    engine = dense().engine("stretches", mesh_of(shape))
    found = dense().sample(engine)
    assert_same(found, reference)
    layout = engine.layout(request_of(engine))
    lengths = found.mask.sum(axis=1).reshape(-1, SAMPLES)
    walk, work = walk_lengths(dense().arch, layout, lengths, dense().prompt_lengths, limit=dense().length, lookahead=0)
    assert work == found.work and all(0 < stage.efficiency < 1 for stage in work.values())
    assert sorted(shape for *_, shape in called(engine)) == sorted(walk.decodes.elements())
    assert len(walk.decodes) >= 3


def test_too_few_pages_for_the_longest_response():
    engine = dense().engine("pages", chunk_length=6)
    layout = engine.layout(request_of(engine))
    with pytest.raises(InputError, match="15 pages of 6 tokens a shard must be at least 16"):
        Queue(dataclasses.replace(layout, pages=15)).add(dense().prompt_lengths, np.full(64, dense().length))


def request_of(engine, **changes):
    sizes = {"prompt_lengths": dense().prompt_lengths, "num_prompts": len(dense().prompts)}
    params = dense().on(engine.settings.mesh)
    return Request(params, **{"num_samples": SAMPLES, "purpose": TRAIN, "sampling": FREE, **sizes, **changes})


@pytest.mark.parametrize("lookahead", [0, 1])
def test_prompts_that_are_added_late_draw_the_same_tokens(lookahead, monkeypatch, reference):
    queues, engine, handed = queues_of(monkeypatch), dense().engine("pages", lookahead=lookahead), []
    request = request_of(engine)

    def submit(first, end, **options):
        return engine.submit(dense().prompts[first:end], range(first, end), request, **options)

    with jax.set_mesh(engine.settings.mesh):
        first = submit(0, 2)
        second = submit(2, 10, on_finished=lambda rows, _: handed.extend(rows.tolist()))
        parts = [first.wait()]
        assert handed, "responses to later prompts end while earlier ones are waited for"
        third = submit(10, 16)
        parts = [part.replace(work={}) for part in (*parts, second.wait(), third.wait())]
        assert engine.give_up() == GivenUp(0, 0, {"prefill": Work(), "decode": Work()})
    engine.close()
    assert_same(jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts), reference)
    assert sorted(handed) == list(range(8 * SAMPLES))
    assert_all_pages_are_free(queues[0])


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_waited_for_is_given_up(kind, monkeypatch, reference):
    queues, engine = queues_of(monkeypatch), dense().engine(kind, lookahead=1)
    request = request_of(engine)
    with jax.set_mesh(engine.settings.mesh):
        first, _ = (engine.submit(dense().prompts[part], range(16)[part], request) for part in np.s_[:4, 4:])
        found = first.wait()
        given_up = engine.give_up()
    engine.close()
    assert_same(found, reference, slice(4 * SAMPLES))
    assert 0 < given_up.responses < 12 * SAMPLES and given_up.tokens >= given_up.responses
    assert given_up.tokens <= reference.mask[4 * SAMPLES :].sum() and given_up.work["decode"].needed == 0
    assert_all_pages_are_free(queues[0])


@pytest.mark.parametrize("kind", KINDS)
def test_limits_and_a_stop_rule_cut_responses_and_each_is_handed_on_once(kind, reference):
    whole, handed = reference, []
    limits = np.arange(len(whole.mask)) % 40 + 1
    limits[0] = dense().length

    def stop(tokens, looked_at):
        return next((i + 1 for i in range(looked_at, len(tokens)) if tokens[i] in (10, 11)), None)

    def on_finished(rows, rollout):
        handed.extend(zip(rows.tolist(), rollout.mask[rows].sum(axis=1), strict=True))

    found = dense().sample(dense().engine(kind, lookahead=1), limits=limits, stop=stop, on_finished=on_finished)
    stopped = cut = 0
    for row, limit in enumerate(limits):
        tokens = whole.responses[row][whole.mask[row]].tolist()
        kept = stop(tokens[:limit], 0) or min(len(tokens), limit)
        assert found.responses[row][found.mask[row]].tolist() == tokens[:kept]
        assert not found.logprobs[row, kept:].any() and (found.responses[row, kept:] == PAD).all()
        is_stopped = stop(tokens[:limit], 0) is not None
        assert found.finished[row] == (is_stopped or (whole.finished[row] and len(tokens) <= limit))
        stopped, cut = stopped + (is_stopped and kept < len(tokens)), cut + (not found.finished[row])
    assert stopped > 5 and cut > 5
    assert sorted(handed) == list(enumerate(found.mask.sum(axis=1)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_number_decides_the_draws_and_no_two_share_them(kind):
    engine, prompts, length = dense().engine(kind), [[7] * 23] * 16, dense().length

    def rows(numbers):
        rollout = dense().sample(
            engine, prompts=prompts, numbers=numbers, sampling=Sampling.create(1.0, 1.0, -1, min_length=length)
        )
        return [row.tobytes() for row in rollout.responses]

    first, later = rows(range(16)), rows([3, *range(17, 32)])
    assert len(set(first)) == len(first) == 16 * SAMPLES
    assert later[:SAMPLES] == first[3 * SAMPLES : 4 * SAMPLES] and not set(later[SAMPLES:]) & set(first)


@pytest.mark.short("stretches-(1, 1, 1)-free", "pages-(2, 2, 2)-free")
@pytest.mark.long("pages-(1, 1, 1)")  # also with a minimum length
@pytest.mark.parametrize("way", ["free", "long"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_response_in_segments_is_the_same_response(kind, shape, way, reference):
    """Begun responses have other lengths, one of them ends at once; sample and position address the draws."""
    sampling = Sampling.create(*WAYS[way])
    whole = reference if sampling == FREE else dense().sample(dense().engine("pages"), sampling=sampling)
    length = np.minimum(np.arange(len(whole.mask)) % 17 + 1, whole.mask.sum(axis=1) - 1)
    rows = np.flatnonzero(length > 0)
    kept, drawn = whole.mask & (np.arange(dense().length) < length[:, None]), (whole.responses, whole.mask)
    parts = Rollout(*(np.where(kept, array, 0)[rows] for array in (*drawn, whole.logprobs)), whole.finished)
    limits = np.minimum(length + 20, dense().length)[rows]
    found = dense().sample(
        dense().engine(kind, mesh_of(shape), max_num_seqs=24, lookahead=1),
        sampling=sampling,
        prompts=[dense().prompts[row // SAMPLES] for row in rows],
        numbers=rows // SAMPLES,
        num_samples=1,
        begun=Begun(rows % SAMPLES, parts),
        limits=limits,
    )
    expected = whole.mask[rows] & (np.arange(dense().length) < limits[:, None])
    np.testing.assert_array_equal(found.mask, expected)
    np.testing.assert_array_equal(found.responses[expected], whole.responses[rows][expected])
    np.testing.assert_allclose(found.logprobs[expected], whole.logprobs[rows][expected], atol=1e-5)
    np.testing.assert_array_equal(found.finished, whole.finished[rows] & (whole.mask.sum(axis=1)[rows] <= limits))


def test_few_programs_decode_and_a_restored_engine_has_the_same_sizes():
    engine, other = (dense().engine("pages") for _ in range(2))
    for _ in range(2):
        dense().sample(engine)
    assert len(set(called(engine))) <= 3 and set(called(engine)) <= set(engine.programs.prepared)
    assert engine.learnt.history(EVALUATE).held() > engine.learnt.history(TRAIN).held()
    other.learnt.restore(engine.learnt.state())
    assert other.layout(request_of(other)) == engine.layout(request_of(engine))
    assert other.learnt.history(TRAIN).held() == engine.learnt.history(TRAIN).held() < dense().length


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_shapes_are_compiled_once_whatever_the_sampling(kind):
    compiled, engine = [], dense().engine(kind)
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


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_copies_no_keys_and_values(kind):
    """They are donated and written in place: a chunk needs less memory besides them than they take."""
    engine = dense().engine(kind, max_num_seqs=1000, max_response_length=400)
    calls = engine_module.Calls(
        engine.settings, dense().on(one_device_mesh()), engine.layout(request_of(engine)), engine.attend
    )
    with jax.set_mesh(one_device_mesh()):
        memory = calls.lower_decode(calls.layout.first_shape).compile().memory_analysis()
    held = sum(np.prod(array.shape) * 4 for array in jax.tree.leaves(calls.held().cache))
    assert memory.alias_size_in_bytes >= held
    assert kind == "pages" or memory.temp_size_in_bytes < held / 2


@pytest.mark.slow
def test_bfloat16_matrices_keep_the_shape_of_things(reference):
    arch = dense().arch
    params = jax.jit(lambda: cast_matrices(init_params(arch, 0), arch, jnp.dtype("bfloat16")))()
    coarse = dataclasses.replace(dense(), params=jax.device_get(unstack_layers(params, arch)), length=9)
    rollout = coarse.sample(coarse.engine("stretches"))
    assert (rollout.responses == reference.responses[:, :9]).mean() > 0.8 and np.isfinite(rollout.logprobs).all()
