"""Layers with a window: both engines sample as `forward` scores, and hold no more than the window needs."""

import dataclasses
import functools
from pathlib import Path

import jax
import numpy as np
import pytest
from shapes import mesh_of, one_device_mesh
from small_policy import engine_settings

from dapo_jax.data.padding import pad_prompts
from dapo_jax.learner.decode_weights import unstack_layers
from dapo_jax.models.flops import token_flops
from dapo_jax.models.load import load_params, read_model_architecture
from dapo_jax.models.paged_attention import attend_gathered
from dapo_jax.models.transformer import forward, logits, positions_of
from dapo_jax.parallel.sharding import replicated
from dapo_jax.rollout import engine_settings as engine_settings_module
from dapo_jax.rollout import slots as slots_module
from dapo_jax.rollout import wave_walk
from dapo_jax.rollout.engine_settings import SCORES, cache_bytes
from dapo_jax.rollout.needed_work import needed_work
from dapo_jax.rollout.round_walk import walk_round
from dapo_jax.rollout.sampling import TRAIN, Sampling
from dapo_jax.rollout.shapes import LengthHistory
from dapo_jax.rollout.slot_plan import plan_slots
from dapo_jax.rollout.slot_programs import layout_of_slots, slots_shape
from dapo_jax.rollout.slot_queue import SlotQueue
from dapo_jax.rollout.slot_walk import walk_slots
from dapo_jax.rollout.slots import SlotEngine
from dapo_jax.rollout.wave_plan import plan_waves
from dapo_jax.rollout.wave_programs import layout_of_waves, wave_shape
from dapo_jax.rollout.waves import WaveEngine

DATA = Path(__file__).parents[1] / "models" / "data"
NAMES = ["gemma3", "gemma2_softcap", "olmo3", "mistral_sliding"]
WINDOW, LENGTH, WIDTH, SAMPLES = 16, 60, 48, 4
EOS, PAD = tuple(range(2, 8)), 0  # so many that some responses end early
PROMPTS = [[8 + (3 * i + 7 * j) % 150 for j in range(1 + i * 11 % 43)] for i in range(8)]
LENGTHS = np.array([len(prompt) for prompt in PROMPTS])
# With 0 to 7, the draw of one token falls on the boundary between two, and a processor's rounding chooses.
NUMBERS = range(8, 8 + len(PROMPTS))


@functools.cache
def model(name):
    """One repetition of the kinds of its layers."""
    arch = read_model_architecture(DATA / name)
    params = load_params(DATA / name, arch, lambda weight, array: array)
    arch = dataclasses.replace(arch, num_layers=len(arch.pattern))
    layers = {leaf: array[: arch.num_layers] for leaf, array in params["layers"].items()}
    return arch, jax.device_get(unstack_layers({**params, "layers": layers}, arch))


def settings_of(name, mesh=None, **changes):
    own = {"arch": model(name)[0], "eos_ids": EOS, "pad_id": PAD, "max_prompt_length": WIDTH}
    own |= {"max_response_length": LENGTH, "chunk_length": 8, "max_num_seqs": 16}
    return engine_settings(mesh or one_device_mesh(), **{**own, **changes})


def sample(engine, name):
    mesh = engine.settings.mesh
    with jax.set_mesh(mesh):
        try:
            return engine.generate(
                jax.device_put(model(name)[1], replicated(mesh)),
                PROMPTS,
                NUMBERS,
                num_samples=SAMPLES,
                purpose=TRAIN,
                sampling=Sampling.create(1.0, 1.0, -1),
            )
        finally:
            engine.close()


def slot_engine(name, mesh=None, **changes):
    return SlotEngine(settings_of(name, mesh, **changes), attend_gathered)


@functools.cache
def waves(name):
    """One wave of all rows, with the widest cache from the start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wave_walk, "rungs", lambda rows, smallest: [rows])
        return sample(WaveEngine(settings_of(name, max_num_seqs=1000)), name)


def assert_same(found, expected):
    np.testing.assert_array_equal(found.mask, expected.mask)
    np.testing.assert_array_equal(found.responses, expected.responses)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=2e-5)


@functools.partial(jax.jit, static_argnums=3)
def score(params, tokens, mask, arch):
    hidden = forward(params, tokens, positions_of(mask), mask, arch)
    return jax.nn.log_softmax(logits(params, hidden, arch)[:, WIDTH - 1 : -1])


@pytest.mark.short("gemma3")
@pytest.mark.parametrize("name", NAMES)
def test_log_probabilities_are_those_of_forward(name):
    arch, params = model(name)
    rollout = waves(name)
    lengths = rollout.mask.sum(axis=1)
    assert arch.window == WINDOW and lengths.max() == LENGTH and lengths.min() < WINDOW
    assert LENGTHS.min() < WINDOW < LENGTHS.max()
    prompts, prompt_mask = pad_prompts(PROMPTS, WIDTH, PAD)
    tokens = np.concatenate([prompts.repeat(SAMPLES, 0), rollout.responses], axis=1)
    mask = np.concatenate([prompt_mask.repeat(SAMPLES, 0), rollout.mask], axis=1)
    expected = np.take_along_axis(score(params, tokens, mask, arch), rollout.responses[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(rollout.logprobs[rollout.mask], expected[rollout.mask], atol=1e-4)


@pytest.mark.short("[24, 48, 72]")
@pytest.mark.parametrize(
    ("ladder", "changes"),
    [
        ([8, 24, 64], {}),  # rings of half the window, then of all of it
        ([12, 24, 36, 60], {"chunk_length": 12, "lookahead": 1, "max_num_seqs": 1000}),
        ([24, 48, 72], {"chunk_length": 24}),
    ],
    ids=str,
)
def test_fewer_rows_and_wider_caches_change_no_token(ladder, changes, monkeypatch):
    name = "gemma2_softcap"
    expected = waves(name)  # which are kept for other tests: with the usual windows
    monkeypatch.setattr(engine_settings_module, "windows", lambda longest, chunk: ladder)
    monkeypatch.setattr(wave_walk, "rungs", lambda rows, smallest: list(range(rows, 0, -3)))
    assert_same(sample(WaveEngine(settings_of(name, **changes)), name), expected)


@pytest.mark.short("gemma3")
@pytest.mark.parametrize("name", NAMES)
def test_slots_draw_the_tokens_of_waves(name):
    assert_same(sample(slot_engine(name), name), waves(name))


@pytest.mark.short("{'chunk_length': 5}", "{'chunk_length': 64}")
@pytest.mark.parametrize(
    "changes",
    [{"chunk_length": 4, "lookahead": 1}, {"chunk_length": 5}, {"chunk_length": 16, "max_num_seqs": 7}]
    + [{"chunk_length": 24, "lookahead": 2}, {"chunk_length": 64}],
    ids=str,
)
def test_chunks_shorter_and_longer_than_the_window(changes):
    assert_same(sample(slot_engine("gemma2_softcap", **changes), "gemma2_softcap"), waves("gemma2_softcap"))


@pytest.mark.short("9")
@pytest.mark.parametrize("window", [1, 2, 9, 17])
def test_windows_that_end_anywhere_in_a_page(window, monkeypatch):
    arch, params = model("mistral_sliding")
    changed = dataclasses.replace(arch, pattern=(dataclasses.replace(arch.pattern[0], window=window),))
    monkeypatch.setitem(globals(), "model", lambda name: (changed, params))
    expected = sample(WaveEngine(settings_of("mistral_sliding")), "mistral_sliding")
    assert_same(sample(slot_engine("mistral_sliding"), "mistral_sliding"), expected)


@pytest.mark.short("mistral_sliding-waves")
@pytest.mark.parametrize("engine", ["waves", "slots"])
@pytest.mark.parametrize("name", ["gemma2_softcap", "mistral_sliding"])
def test_devices_share_the_rows(name, engine, monkeypatch):
    monkeypatch.setattr(wave_walk, "rungs", lambda rows, smallest: list(range(rows, 0, -1)))
    mesh, made = mesh_of((2, 2, 2)), {"waves": lambda *args, **_: WaveEngine(settings_of(*args)), "slots": slot_engine}
    assert_same(sample(made[engine](name, mesh, lookahead=1), name), waves(name))


def queues_of(monkeypatch, pages):
    """The queues that engines make from now on, with so many pages a shard; None = as many as they take."""
    queues = []

    def made(layout):
        queues.append(SlotQueue(layout))
        return queues[-1]

    def layout_of(*args, **sizes):
        layout = layout_of_slots(*args, **sizes)
        return dataclasses.replace(layout, pages=pages or layout.pages)

    monkeypatch.setattr(slots_module, "layout_of_slots", layout_of)
    monkeypatch.setattr(slots_module, "SlotQueue", made)
    return queues


@pytest.mark.parametrize("pages", [None, 28])
@pytest.mark.parametrize("name", ["gemma2_softcap", "mistral_sliding"])
def test_rows_given_up_draw_the_same_tokens_again(name, pages, monkeypatch):
    queues = queues_of(monkeypatch, pages)
    assert_same(sample(slot_engine(name, lookahead=1), name), waves(name))
    [queue] = queues
    assert (queue.given_up > 5) == (pages is not None)
    for shard in queue.shards:
        assert sorted(shard.windows.free) == list(range(1, queue.layout.window_pages))
        assert sorted(shard.free) == list(range(1, queue.layout.pages))


def test_a_wave_holds_no_more_than_the_window():
    settings = settings_of("gemma3")
    wave = wave_shape(settings, np.float32, rows=8, prompts=2, width=48, window=64)
    widths = [(cache.prompt_key.shape[3], cache.prompt_value.shape[2]) for cache in wave.caches]
    assert widths == [(16, 16)] * 3 + [(48, 48)]
    assert [(cache.key.shape[3], cache.window) for cache in wave.caches] == [(16, 16)] * 3 + [(64, 64)]


def layout_of(name, *, free=0.0, lengths=LENGTHS, **changes):
    settings = settings_of(name, **changes)
    dtype, history = np.dtype(np.float32), LengthHistory(settings.max_response_length)
    layout = layout_of_slots(settings, dtype, lengths, SAMPLES, history, free)
    return layout, slots_shape(settings, dtype, layout).pages


@pytest.mark.parametrize("free", [3e5, 1e6, 1e7])
def test_waves_fit_the_memory(free):
    """A token takes 256 bytes of a layer, scores of a row 4 * 4 * 160 bytes."""
    settings = settings_of("gemma3", max_num_seqs=0, max_response_length=1000)
    dtype, history, lengths = np.dtype(np.float32), LengthHistory(1000), np.repeat(LENGTHS, 50)
    assert cache_bytes(settings, dtype, 1000) == 256 * (3 * 16 + 1000)
    layout = layout_of_waves(settings, dtype, lengths, 1, history, free)
    wave = wave_shape(settings, dtype, rows=layout.num_rows, prompts=layout.num_rows, width=layout.width, window=1000)
    held = sum(array.size * 4 for array in jax.tree.leaves(wave.caches)) + layout.num_rows * 4 * SCORES * 160
    assert 0.5 * free < held <= free or layout.num_rows == 8


def test_work_counts_what_a_window_sees():
    """Three layers of four have a window of 16 tokens; two responses of 41 tokens follow a prompt of 20."""
    arch, _ = model("gemma3")
    flops, windowed, full = token_flops(arch), 16 * 17 / 2 + 4 * 16, 20 * 21 / 2
    needed = needed_work(arch, np.array([20]), np.array([[41, 41]]))
    assert needed["prefill"] == 20 * flops.layers + flops.pair * (3 * windowed + full) / 4
    keys = (3 * 40 * 16 + 40 * 20 + 40 * 41 / 2) / 4
    assert needed["decode"] == 2 * (40 * (flops.layers + flops.head) + keys * flops.pair)


@pytest.mark.parametrize("name", NAMES)
def test_the_walk_without_devices_counts_what_waves_compute(name):
    """Their widest cache is as wide as the first."""
    rollout, settings = waves(name), settings_of(name, max_num_seqs=1000, smallest_rows=1000)
    lengths = rollout.mask.sum(axis=1).reshape(-1, SAMPLES)
    walk = walk_round(settings, np.float32, lengths, LENGTHS, history=LengthHistory(LENGTH), free_bytes=0.0)
    assert walk.work == rollout.work
    flops, share = token_flops(model(name)[0]), {"gemma2_softcap": 1 / 2, "mistral_sliding": 0}.get(name, 1 / 4)
    keys = share * (WIDTH + 64) + (1 - share) * (16 + 16)
    tokens = len(PROMPTS) * SAMPLES * 64
    assert walk.work["decode"].computed == pytest.approx(tokens * (flops.layers + flops.head + keys * flops.pair))


def test_plans_list_programs_that_lower():
    """Layers of each kind change their shapes in calls of their own."""
    name, mesh = "gemma2_softcap", one_device_mesh()
    like = functools.partial(jax.ShapeDtypeStruct, sharding=replicated(mesh))
    weights = jax.tree.map(lambda x: like(x.shape, x.dtype), model(name)[1])
    lengths = np.arange(1, 65).reshape(8, 8)
    known = {"response_lengths": np.minimum(lengths, LENGTH), "prompt_lengths": LENGTHS, "free_bytes": 0.0}
    settings = settings_of(name, mesh, max_num_seqs=1000, smallest_rows=32, max_response_length=100)
    waves = plan_waves(settings, weights, **known)
    slots = plan_slots(settings, weights, attend_pages=attend_gathered, max_tokens=None, **known)
    resizes = [program for program in waves.programs if "keep" in program.name]
    assert [program.cache[1].window for program in resizes] == [WINDOW, 64] * 2  # from 64 rows to 48, then to 32
    with jax.set_mesh(mesh):
        for program in [*waves.programs, *slots.programs]:
            program.lower()


def test_the_walk_of_slots_counts_the_pages_that_a_window_sees():
    """A prompt of 20 tokens, of which 19 are prefilled, has three pages; a response of 32 tokens takes four chunks."""
    arch, (layout, _) = model("gemma3")[0], layout_of("gemma3")
    walk, work = walk_slots(arch, layout, np.array([[32] * SAMPLES]), np.array([20]), limit=32, lookahead=0)
    assert sum(walk.pages.values()) == SAMPLES * (3 * 4 * 2 + 3 + 4 + 5 + 6) / 4
    assert 0 < work["decode"].efficiency < 1


def test_slots_hold_no_more_than_the_window_and_a_page():
    """A row has two pages of 8 tokens that a window of 16 reaches, as its prompt has."""
    layout, pages = layout_of("gemma3", max_response_length=1000)
    most = 1 + 2 * layout.slots + 2 * layout.open_prompts
    assert layout.reach == 2 and layout.window_pages == most < layout.pages / 10
    assert [array.shape[0] for array in pages] == [most] * 3 + [layout.pages]
    layout, pages = layout_of("mistral_sliding", max_response_length=1000)
    assert all(array.shape[0] == layout.window_pages == most for array in pages)


@pytest.mark.parametrize("pages", [None, 20, 45])
@pytest.mark.parametrize("num_samples", [1, 3])
def test_pages_of_windows_never_run_out_before_the_others(num_samples, pages):
    """With few slots, long waits and prompts of any length."""
    settings, rng = settings_of("gemma3", max_num_seqs=3 * num_samples), np.random.default_rng(0)
    prompts, responses = rng.integers(1, WIDTH + 1, 60), rng.integers(1, LENGTH + 1, (60, num_samples))
    history = LengthHistory(LENGTH)
    layout = layout_of_slots(settings, np.dtype(np.float32), prompts, num_samples, history, 0.0)
    for at_once in (1, 5):
        prefills = tuple(size._replace(at_once=at_once) for size in layout.prefills)
        own, prompt = (min(layout.reach, most) for most in (layout.own_pages(LENGTH), layout.prompt_pages(WIDTH + 1)))
        most = 1 + layout.slots * own + (layout.slots + 2 * at_once) * prompt
        windows = min(most, pages or layout.pages)
        narrow = dataclasses.replace(layout, prefills=prefills, window_pages=windows, pages=pages or layout.pages)
        walk, _ = walk_slots(settings.arch, narrow, responses, prompts, limit=LENGTH, lookahead=1)
        [shard] = walk.queue.shards
        assert sorted(shard.windows.free) == list(range(1, windows))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("free", [6e5, 1e6, 1e7, 1e8])
def test_slots_and_pages_fit_the_memory(name, free):
    layout, pages = layout_of(name, free=free, lengths=np.repeat(LENGTHS, 50), max_num_seqs=0, memory_share=0.5)
    held = sum(array.size * 4 for array in pages)
    assert held <= 0.5 * free and layout.slots >= 1
