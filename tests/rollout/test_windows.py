"""Layers with a window: both engines sample as `forward` scores, and hold no more than the window needs."""

import dataclasses
import functools
from pathlib import Path

import jax
import numpy as np
import pytest
from rollout.small_rollouts import SAMPLES, Rollouts, assert_all_pages_are_free, assert_same, queues_of
from shapes import mesh_of, one_device_mesh

from dapo_jax.learner.decode_weights import unstack_layers
from dapo_jax.models.flops import token_flops
from dapo_jax.models.load import load_params, read_model_architecture
from dapo_jax.models.paged_attention import attend_gathered
from dapo_jax.parallel.sharding import replicated
from dapo_jax.rollout import engine_settings as engine_settings_module
from dapo_jax.rollout import wave_walk
from dapo_jax.rollout.engine_settings import SCORES, cache_bytes
from dapo_jax.rollout.needed_work import needed_work
from dapo_jax.rollout.round_walk import walk_round
from dapo_jax.rollout.shapes import LengthHistory
from dapo_jax.rollout.slot_plan import plan_slots
from dapo_jax.rollout.slot_programs import layout_of_slots, slots_shape
from dapo_jax.rollout.slot_walk import walk_slots
from dapo_jax.rollout.wave_plan import plan_waves
from dapo_jax.rollout.wave_programs import layout_of_waves, wave_shape

DATA = Path(__file__).parents[1] / "models" / "data"
NAMES = ["gemma3", "gemma2_softcap", "olmo3", "mistral_sliding"]
SOFTCAP, MISTRAL = NAMES[1], NAMES[3]  # one layer of two has a window, or all
WINDOW, LENGTH, WIDTH = 16, 60, 48
PROMPTS = [[8 + (3 * i + 7 * j) % 150 for j in range(1 + i * 11 % 43)] for i in range(8)]
LENGTHS = np.array([len(prompt) for prompt in PROMPTS])
EOS = tuple(range(2, 8))  # so many that some responses end early
# With 0 to 7, the draw of one token falls on the boundary between two, and a processor's rounding chooses.
NUMBERS = range(8, 8 + len(PROMPTS))

same = functools.partial(assert_same, tolerance=2e-5)


@functools.cache
def family(name):
    """One repetition of the kinds of its layers."""
    arch = read_model_architecture(DATA / name)
    params = load_params(DATA / name, arch, lambda weight, array: array)
    arch = dataclasses.replace(arch, num_layers=len(arch.pattern))
    layers = {leaf: array[: arch.num_layers] for leaf, array in params["layers"].items()}
    params = jax.device_get(unstack_layers({**params, "layers": layers}, arch))
    return Rollouts(arch, params, PROMPTS, EOS, length=LENGTH, width=WIDTH, numbers=NUMBERS, tolerance=1e-4)


@pytest.fixture(scope="module")
def softcap():
    assert family(SOFTCAP).reference.mask.any()
    return family(SOFTCAP)


@pytest.mark.slow
@pytest.mark.long("gemma3", MISTRAL)  # some layers have a window, or all
@pytest.mark.parametrize("name", NAMES)
def test_both_engines_draw_what_one_pass_over_each_sequence_draws(name):
    """The waves keep all rows, and their widest cache is as wide as the first: the walk counts what they compute."""
    rollouts, expected = family(name), family(name).reference
    assert rollouts.arch.window == WINDOW
    same(rollouts.sample(rollouts.slots()), expected)
    engine = rollouts.waves(smallest_rows=1000)
    found = rollouts.sample(engine)
    same(found, expected)
    walk = walked(engine, found)
    assert walk.work == found.work
    flops, share = token_flops(rollouts.arch), {SOFTCAP: 1 / 2, MISTRAL: 0}.get(name, 1 / 4)
    keys = share * (WIDTH + 64) + (1 - share) * (16 + 16)
    tokens = len(PROMPTS) * SAMPLES * 64
    assert walk.work["decode"].computed == pytest.approx(tokens * (flops.layers + flops.head + keys * flops.pair))


def walked(engine, found):
    lengths, history = found.mask.sum(axis=1).reshape(-1, SAMPLES), LengthHistory(LENGTH)
    return walk_round(engine.settings, np.float32, lengths, LENGTHS, history=history, free_bytes=0.0)


@pytest.mark.short("12-[48, 72]")
@pytest.mark.long("[8, 24, 64]")
@pytest.mark.parametrize(
    ("fewer", "ladder", "changes"),
    [
        (3, [8, 24, 64], {"max_num_seqs": 16}),  # rings of half the window, then of all of it
        (3, [12, 24, 36, 60], {"chunk_length": 12, "lookahead": 1}),
        (3, [24, 48, 72], {"chunk_length": 24, "max_num_seqs": 16}),
        (12, [48, 72], {"chunk_length": 24}),
    ],
    ids=str,
)
def test_fewer_rows_and_wider_caches_change_no_token(fewer, ladder, changes, softcap, monkeypatch):
    lengths = softcap.reference.mask.sum(axis=1)
    assert lengths.max() == LENGTH and lengths.min() < WINDOW and LENGTHS.min() < WINDOW < LENGTHS.max()
    monkeypatch.setattr(engine_settings_module, "windows", lambda longest, chunk: ladder)
    monkeypatch.setattr(wave_walk, "rungs", lambda rows, smallest: list(range(rows, 0, -fewer)))
    engine = softcap.waves(**changes)
    found = softcap.sample(engine)
    same(found, softcap.reference)
    assert walked(engine, found).work == found.work


@pytest.mark.slow
@pytest.mark.long("{'chunk_length': 64}")
@pytest.mark.parametrize(
    "changes",
    [{"chunk_length": 4, "lookahead": 1}, {"chunk_length": 5}, {"chunk_length": 16, "max_num_seqs": 7}]
    + [{"chunk_length": 24, "lookahead": 2}, {"chunk_length": 64}],
    ids=str,
)
def test_chunks_shorter_and_longer_than_the_window(changes, softcap):
    same(softcap.sample(softcap.slots(**changes)), softcap.reference)


@pytest.mark.slow
@pytest.mark.long("gemma2_softcap-45-5", MISTRAL)
@pytest.mark.parametrize(
    ("name", "pages", "chunk_length"),
    [(SOFTCAP, 45, 5), (SOFTCAP, 28, 8), (SOFTCAP, None, 8), (MISTRAL, 28, 8), (MISTRAL, None, 8)],
)
def test_rows_given_up_draw_the_same_tokens_again(name, pages, chunk_length, monkeypatch):
    expected, queues = family(name).reference, queues_of(monkeypatch, pages)
    same(family(name).sample(family(name).slots(lookahead=1, chunk_length=chunk_length)), expected)
    assert (queues[0].given_up > 5) == (pages is not None)
    assert_all_pages_are_free(queues[0])


@pytest.mark.slow
@pytest.mark.long("9")
@pytest.mark.parametrize("window", [1, 2, 9, 17])
def test_windows_that_end_anywhere_in_a_page(window):
    pattern = (dataclasses.replace(family(MISTRAL).arch.pattern[0], window=window),)
    rollouts = dataclasses.replace(family(MISTRAL), arch=dataclasses.replace(family(MISTRAL).arch, pattern=pattern))
    same(rollouts.sample(rollouts.waves()), rollouts.reference)
    same(rollouts.sample(rollouts.slots()), rollouts.reference)


@pytest.mark.slow
@pytest.mark.long("waves-mistral_sliding", "slots-gemma2_softcap")  # each engine, and both kinds of layers
@pytest.mark.parametrize("name", [SOFTCAP, MISTRAL])
@pytest.mark.parametrize("kind", ["waves", "slots"])
def test_devices_share_the_rows(kind, name, monkeypatch):
    monkeypatch.setattr(wave_walk, "rungs", lambda rows, smallest: list(range(rows, 0, -1)))
    engine = family(name).engine(kind, mesh_of((2, 2, 2)), max_num_seqs=16, lookahead=1)
    same(family(name).sample(engine), family(name).reference)


def test_a_wave_holds_no_more_than_the_window():
    wave = wave_shape(family("gemma3").settings(), np.float32, rows=8, prompts=2, width=48, window=64)
    widths = [(cache.prompt_key.shape[3], cache.prompt_value.shape[2]) for cache in wave.caches]
    assert widths == [(16, 16)] * 3 + [(48, 48)]
    assert [(cache.key.shape[3], cache.window) for cache in wave.caches] == [(16, 16)] * 3 + [(64, 64)]


@pytest.mark.parametrize("free", [3e5, 1e6, 1e7])
def test_waves_fit_the_memory(free):
    """A token takes 256 bytes of a layer, scores of a row 4 * 4 * 160 bytes."""
    settings = family("gemma3").settings(max_num_seqs=0, max_response_length=1000)
    dtype, history, lengths = np.dtype(np.float32), LengthHistory(1000), np.repeat(LENGTHS, 50)
    assert cache_bytes(settings, dtype, 1000) == 256 * (3 * 16 + 1000)
    layout = layout_of_waves(settings, dtype, lengths, 1, history, free)
    wave = wave_shape(settings, dtype, rows=layout.num_rows, prompts=layout.num_rows, width=layout.width, window=1000)
    held = sum(array.size * 4 for array in jax.tree.leaves(wave.caches)) + layout.num_rows * 4 * SCORES * 160
    assert 0.5 * free < held <= free or layout.num_rows == 8


def test_work_counts_what_a_window_sees():
    """Three layers of four have a window of 16 tokens; two responses of 41 tokens follow a prompt of 20."""
    arch = family("gemma3").arch
    flops, windowed, full = token_flops(arch), 16 * 17 / 2 + 4 * 16, 20 * 21 / 2
    needed = needed_work(arch, np.array([20]), np.array([[41, 41]]))
    assert needed["prefill"] == 20 * flops.layers + flops.pair * (3 * windowed + full) / 4
    keys = (3 * 40 * 16 + 40 * 20 + 40 * 41 / 2) / 4
    assert needed["decode"] == 2 * (40 * (flops.layers + flops.head) + keys * flops.pair)


@pytest.mark.slow
def test_plans_list_programs_that_lower():
    """Layers of each kind change their shapes in calls of their own."""
    mesh, rollouts = one_device_mesh(), family(SOFTCAP)
    like = functools.partial(jax.ShapeDtypeStruct, sharding=replicated(mesh))
    weights = jax.tree.map(lambda x: like(x.shape, x.dtype), rollouts.params)
    lengths = np.minimum(np.arange(1, 65).reshape(8, 8), LENGTH)
    known = {"response_lengths": lengths, "prompt_lengths": LENGTHS, "free_bytes": 0.0}
    settings = rollouts.settings(mesh, max_num_seqs=1000, smallest_rows=32, max_response_length=100)
    waves = plan_waves(settings, weights, **known)
    slots = plan_slots(settings, weights, attend_pages=attend_gathered, max_tokens=None, **known)
    resizes = [program for program in waves.programs if "keep" in program.name]
    assert [program.cache[1].window for program in resizes] == [WINDOW, 64] * 2  # from 64 rows to 48, then to 32
    with jax.set_mesh(mesh):
        for program in [*waves.programs, *slots.programs]:
            program.lower()


def layout_of(name, *, free=0.0, lengths=LENGTHS, num_samples=SAMPLES, **changes):
    settings = family(name).settings(**{"max_num_seqs": 16, **changes})
    dtype, history = np.dtype(np.float32), LengthHistory(settings.max_response_length)
    layout = layout_of_slots(settings, dtype, lengths, num_samples, history, free)
    return layout, slots_shape(settings, dtype, layout).pages


def test_the_walk_of_slots_counts_the_pages_that_a_window_sees():
    """A prompt of 20 tokens, of which 19 are prefilled, has three pages; a response of 32 tokens takes four chunks."""
    arch, (layout, _) = family("gemma3").arch, layout_of("gemma3")
    walk, work = walk_slots(arch, layout, np.array([[32] * SAMPLES]), np.array([20]), limit=32, lookahead=0)
    assert sum(walk.pages.values()) == SAMPLES * (3 * 4 * 2 + 3 + 4 + 5 + 6) / 4
    assert 0 < work["decode"].efficiency < 1


def test_slots_hold_no_more_than_the_window_and_a_page():
    """A row has two pages of 8 tokens that a window of 16 reaches, as its prompt has."""
    layout, pages = layout_of("gemma3", max_response_length=1000)
    most = 1 + 2 * layout.slots + 2 * layout.open_prompts
    assert layout.reach == 2 and layout.window_pages == most < layout.pages / 10
    assert [array.shape[0] for array in pages] == [most] * 3 + [layout.pages]
    layout, pages = layout_of(MISTRAL, max_response_length=1000)
    assert all(array.shape[0] == layout.window_pages == most for array in pages)


@pytest.mark.parametrize("pages", [None, 20, 45])
@pytest.mark.parametrize("num_samples", [1, 3])
def test_pages_of_windows_never_run_out_before_the_others(num_samples, pages):
    """With few slots, long waits and prompts of any length."""
    rng = np.random.default_rng(0)
    prompts, responses = rng.integers(1, WIDTH + 1, 60), rng.integers(1, LENGTH + 1, (60, num_samples))
    layout, _ = layout_of("gemma3", lengths=prompts, num_samples=num_samples, max_num_seqs=3 * num_samples)
    for at_once in (1, 5):
        prefills = tuple(size._replace(at_once=at_once) for size in layout.prefills)
        own, prompt = (min(layout.reach, most) for most in (layout.own_pages(LENGTH), layout.prompt_pages(WIDTH + 1)))
        most = 1 + layout.slots * own + (layout.slots + 2 * at_once) * prompt
        windows = min(most, pages or layout.pages)
        narrow = dataclasses.replace(layout, prefills=prefills, window_pages=windows, pages=pages or layout.pages)
        walk, _ = walk_slots(family("gemma3").arch, narrow, responses, prompts, limit=LENGTH, lookahead=1)
        [shard] = walk.queue.shards
        assert sorted(shard.windows.free) == list(range(1, windows))


@pytest.mark.parametrize("name", NAMES)
def test_slots_and_pages_fit_the_memory(name):
    for free in (6e5, 1e6, 1e7, 1e8):
        layout, pages = layout_of(name, free=free, lengths=np.repeat(LENGTHS, 50), max_num_seqs=0, memory_share=0.5)
        held = sum(array.size * 4 for array in pages)
        assert held <= 0.5 * free and layout.slots >= 1, free
