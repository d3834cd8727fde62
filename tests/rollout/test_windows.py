"""Layers with a window: the engine samples as `forward` scores, and holds no more than the window needs."""

import dataclasses
import functools
from pathlib import Path

import jax
import numpy as np
import pytest
from rollout.small_rollouts import FREE, GREEDY, SAMPLES, Rollouts, assert_all_pages_are_free, assert_same, queues_of
from scatters import scatters, unordered
from shapes import mesh_of

from dapo_jax.learner.decode_weights import unstack_layers
from dapo_jax.models.flops import token_flops
from dapo_jax.models.hf_architecture import read_architecture
from dapo_jax.models.load import load_params
from dapo_jax.models.paged_attention import attend_gathered
from dapo_jax.models.paged_attention_gpu import attend
from dapo_jax.preflight.rollout import KnownLengths, walk_lengths
from dapo_jax.rollout.counting import Counting
from dapo_jax.rollout.lengths import LengthHistory
from dapo_jax.rollout.programs import Calls
from dapo_jax.rollout.queue import Queue, needed_work
from dapo_jax.rollout.sampling import Sampling
from dapo_jax.rollout.sizes import choose_layout

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
    arch = read_architecture(DATA / name)
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
@pytest.mark.long(MISTRAL)  # test_families has gemma3, of whose layers some have a window
@pytest.mark.parametrize("name", NAMES)
def test_the_engine_draws_what_one_pass_over_each_sequence_draws(name):
    rollouts, expected = family(name), family(name).reference
    assert rollouts.arch.window == WINDOW
    for kind in ("pages", "stretches"):
        same(rollouts.sample(rollouts.engine(kind)), expected)


@pytest.mark.slow
@pytest.mark.long("{'chunk_length': 64}")
@pytest.mark.parametrize(
    "changes",
    [{"chunk_length": 4, "lookahead": 1}, {"chunk_length": 5}, {"chunk_length": 16, "max_num_seqs": 7}]
    + [{"chunk_length": 24, "lookahead": 2}, {"chunk_length": 64}],
    ids=str,
)
def test_chunks_shorter_and_longer_than_the_window(changes, softcap):
    same(softcap.sample(softcap.engine("pages", **changes)), softcap.reference)


@pytest.mark.slow
@pytest.mark.long("gemma2_softcap-45-5", MISTRAL)
@pytest.mark.parametrize(
    ("name", "pages", "chunk_length"),
    [(SOFTCAP, 45, 5), (SOFTCAP, 28, 8), (SOFTCAP, None, 8), (MISTRAL, 28, 8), (MISTRAL, None, 8)],
)
def test_rows_given_up_draw_the_same_tokens_again(name, pages, chunk_length, monkeypatch):
    expected, queues = family(name).reference, queues_of(monkeypatch, pages)
    same(family(name).sample(family(name).engine("pages", lookahead=1, chunk_length=chunk_length)), expected)
    assert (queues[0].shards[0].given_up > 5) == (pages is not None)
    assert_all_pages_are_free(queues[0])


@pytest.mark.slow
@pytest.mark.long("9")
@pytest.mark.parametrize("window", [1, 2, 9, 17])
def test_windows_that_end_anywhere_in_a_page(window):
    pattern = (dataclasses.replace(family(MISTRAL).arch.pattern[0], window=window),)
    rollouts = dataclasses.replace(family(MISTRAL), arch=dataclasses.replace(family(MISTRAL).arch, pattern=pattern))
    for kind in ("pages", "stretches"):
        same(rollouts.sample(rollouts.engine(kind)), rollouts.reference)


@pytest.mark.slow
@pytest.mark.long("stretches-mistral_sliding", "pages-gemma2_softcap")  # both kinds of layers
@pytest.mark.parametrize("name", [SOFTCAP, MISTRAL])
@pytest.mark.parametrize("kind", ["pages", "stretches"])
def test_devices_share_the_rows(kind, name):
    engine = family(name).engine(kind, mesh_of((2, 2, 2)), max_num_seqs=16, lookahead=1)
    same(family(name).sample(engine), family(name).reference)


def test_work_counts_what_a_window_sees():
    """Three layers of four have a window of 16 tokens; two responses of 41 tokens follow a prompt of 20."""
    arch = family("gemma3").arch
    flops, windowed, full = token_flops(arch), 16 * 17 / 2 + 4 * 16, 20 * 21 / 2
    needed = needed_work(arch, np.array([20]), np.array([[41, 41]]))
    assert needed["prefill"] == 20 * flops.layers + flops.pair * (3 * windowed + full) / 4
    keys = (3 * 40 * 16 + 40 * 20 + 40 * 41 / 2) / 4
    assert needed["decode"] == 2 * (40 * (flops.layers + flops.head) + keys * flops.pair)


def test_pages_are_stored_where_no_two_writes_meet():
    """Both kinds of layers say so, when a prompt is put in its pages and when a chunk becomes one."""
    engine, (layout, _) = family(SOFTCAP).engine("pages"), layout_of(SOFTCAP)
    mesh = engine.settings.mesh
    calls = Calls(engine.settings, family(SOFTCAP).on(mesh), layout, attend_gathered)
    with jax.set_mesh(mesh):
        for lowered in (calls.lower_prefill(layout.prefills[-1]), calls.lower_decode(layout.first_shape)):
            text = lowered.as_text()
            assert len(scatters(text)) >= 2 and not unordered(text)


def test_a_plain_draw_has_no_branch():
    """Which would end a GPU's graph of kernels at each token; a filtered one has."""
    engine, (layout, _) = family(SOFTCAP).engine("pages"), layout_of(SOFTCAP)
    mesh, branches = engine.settings.mesh, []
    with jax.set_mesh(mesh):
        for limits in (False, True):
            calls = Calls(engine.settings, family(SOFTCAP).on(mesh), layout, attend_gathered, limits=limits)
            text = calls.lower_decode(layout.first_shape).as_text()
            branches.append("stablehlo.case" in text or "stablehlo.if" in text)
    assert branches == [False, True]
    assert not FREE.limits and GREEDY.limits and Sampling.create(1.0, 1.0, -1, min_length=3).limits


def layout_of(name, *, free=0.0, lengths=LENGTHS, num_samples=SAMPLES, **changes):
    settings = family(name).settings(**{"max_num_seqs": 16, **changes})
    dtype, history = np.dtype(np.float32), LengthHistory(settings.max_response_length)
    layout = choose_layout(settings, attend, dtype, lengths, num_samples, history, free)
    weights = {"layers": [{"query": jax.ShapeDtypeStruct((), dtype)}]}
    return layout, Calls(settings, weights, layout, attend_gathered).held().cache.layers


def test_the_walk_counts_the_pages_that_a_window_sees():
    """A prompt of 20 tokens, of which 19 are prefilled, has three pages; a response of 32 tokens takes four chunks."""
    arch, (layout, _) = family("gemma3").arch, layout_of("gemma3")
    counted, work = walk_lengths(arch, layout, np.array([[32] * SAMPLES]), np.array([20]), limit=32, lookahead=0)
    assert sum(counted.pages.values()) == SAMPLES * (3 * 4 * 2 + 3 + 4 + 5 + 6) / 4
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
        queue, outcome = Queue(narrow, lookahead=1), KnownLengths(responses.reshape(-1))
        queue.add(prompts, np.full(responses.size, LENGTH))
        while queue.step(Counting(family("gemma3").arch, narrow), outcome):
            pass
        assert_all_pages_are_free(queue)


@pytest.mark.parametrize("name", NAMES)
def test_slots_and_pages_fit_the_memory(name):
    for free in (6e5, 1e6, 1e7, 1e8):
        layout, pages = layout_of(name, free=free, lengths=np.repeat(LENGTHS, 50), max_num_seqs=0, memory_share=0.5)
        held = sum(array.size * 4 for array in pages)
        assert held <= 0.5 * free and layout.slots >= 1, free
