"""The engine: what it does to rows and caches between two chunks changes no token."""

import collections
import dataclasses
import functools
import itertools
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import shapes
from shapes import mesh_of, one_device_mesh
from small_policy import engine_settings

from dapo_jax.learner.decode_weights import unstack_layers
from dapo_jax.models.load import load_params, read_model_architecture
from dapo_jax.models.transformer import forward, logits, positions_of
from dapo_jax.models.weights import cast_matrices, init_params
from dapo_jax.parallel.sharding import replicated
from dapo_jax.rollout import engine_settings as engine_settings_module
from dapo_jax.rollout import learnt_sizes, wave_programs, wave_walk
from dapo_jax.rollout import waves as waves_module
from dapo_jax.rollout.round_walk import walk_round
from dapo_jax.rollout.sampling import EVALUATE, TRAIN, Sampling
from dapo_jax.rollout.shapes import LengthHistory
from dapo_jax.rollout.waves import WaveEngine

DATA = Path(__file__).parents[1] / "models" / "data"
ARCH = dataclasses.replace(shapes.ARCH, num_layers=1)
EOS, PAD, LENGTH, SAMPLES = (2, 3), 0, 90, 4
PROMPTS = [[5 + i % 50] * (1 + i % 7) for i in range(24)]


@functools.cache
def host_params(dtype="float32"):
    return jax.device_get(
        unstack_layers(jax.jit(lambda: cast_matrices(init_params(ARCH, 0), ARCH, jnp.dtype(dtype)))(), ARCH)
    )


def make_engine(mesh=None, **changes) -> WaveEngine:
    own = {"arch": ARCH, "eos_ids": EOS, "pad_id": PAD, "max_response_length": LENGTH, "chunk_length": 8}
    made.append(WaveEngine(engine_settings(mesh or one_device_mesh(), **{**own, **changes})))
    return made[-1]


made: list[WaveEngine] = []


@pytest.fixture(autouse=True)
def _nothing_compiles_when_a_test_has_ended():
    yield
    while made:
        made.pop().close()


def sample(engine, *, params=None, prompts=PROMPTS, sampling=None, num_samples=SAMPLES, numbers=None, **options):
    mesh = engine.settings.mesh
    with jax.set_mesh(mesh):
        return engine.generate(
            jax.device_put(params if params is not None else host_params(), replicated(mesh)),
            prompts,
            list(range(len(prompts))) if numbers is None else numbers,
            num_samples=num_samples,
            purpose=TRAIN,
            sampling=sampling or Sampling.create(1.0, 1.0, -1),
            **options,
        )


@functools.cache
def reference():
    """One wave of all rows with the whole cache from the start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wave_walk, "rungs", lambda rows, smallest: [rows])
        patch.setattr(engine_settings_module, "windows", lambda longest, chunk: [-(-(longest - 1) // chunk) * chunk])
        return sample(make_engine())


def assert_same(found, expected):
    np.testing.assert_array_equal(found.mask, expected.mask)
    np.testing.assert_array_equal(found.responses, expected.responses)
    np.testing.assert_array_equal(found.finished, expected.finished)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-5)


def shapes_of(engine):
    """(rows, prompts, prompt width, window) of the programs that were called or prepared."""
    return list(engine.programs._found)


@pytest.mark.parametrize(("lookahead", "chunk_length"), [(0, 8), (1, 8), (3, 8)])
def test_fewer_rows_and_wider_caches_change_no_token(lookahead, chunk_length):
    lengths = reference().mask.sum(axis=1)
    assert lengths.min() < 10 and lengths.max() == LENGTH and not reference().finished.all()
    engine = make_engine(lookahead=lookahead, chunk_length=chunk_length)
    assert_same(sample(engine), reference())
    assert len({rows for rows, *_ in shapes_of(engine)}) >= 4
    assert len({window for *_, window in shapes_of(engine)}) >= 2


@pytest.mark.parametrize("shape", [pytest.param((8, 1, 1), marks=pytest.mark.slow), (2, 2, 2)])
def test_devices_choose_their_own_survivors(shape, monkeypatch):
    monkeypatch.setattr(wave_walk, "rungs", lambda rows, smallest: list(range(rows, 0, -1)))
    engine = make_engine(mesh_of(shape), chunk_length=32)
    assert_same(sample(engine), reference())
    assert len({rows for rows, *_ in shapes_of(engine)}) >= 3


@pytest.mark.parametrize(
    ("shape", "at_once", "parts"),
    [((1, 1, 1), 5, 5), ((2, 2, 2), 4, 2), pytest.param((2, 1, 1), 5, 3, marks=pytest.mark.slow)],
)
def test_prompts_prefilled_in_parts_give_the_same_tokens(shape, at_once, parts, monkeypatch):
    """Of 24 prompts; on one device, the last part repeats one of the part before."""
    expected = reference()
    engine = make_engine(mesh_of(shape), smallest_rows=1000, chunk_length=30)
    room = (at_once + 0.5) * wave_programs.prefill_bytes(engine.settings, 8)
    monkeypatch.setattr(wave_programs, "PREFILL_BYTES", room)
    monkeypatch.setattr(waves_module, "prefill_part", counted := mock.Mock(wraps=waves_module.prefill_part))
    assert_same(sample(engine), expected)
    assert counted.call_count == parts


def test_the_walk_without_devices_counts_what_the_engine_calls(monkeypatch):
    """Two waves, the second one not full, on four shards of two devices."""
    engine = make_engine(mesh_of((2, 2, 2)), max_num_seqs=64, lookahead=1, chunk_length=16, smallest_rows=8)
    called = collections.Counter()
    get = engine.programs.get
    monkeypatch.setattr(engine.programs, "get", lambda key, lower: (called.update([key]), get(key, lower))[1])
    rollout = sample(engine, prompts=PROMPTS[:20])
    lengths = rollout.mask.sum(axis=1).reshape(-1, SAMPLES)
    walk = walk_round(
        engine.settings,
        np.dtype(np.float32),
        lengths,
        np.array([len(prompt) for prompt in PROMPTS[:20]]),
        history=LengthHistory(LENGTH),
        free_bytes=0.0,
    )
    assert walk.waves == 2 and walk.decodes == called and len(called) > 2
    assert walk.work == rollout.work and walk.resizes.total() > 2
    assert all(0 < work.efficiency < 1 for work in walk.work.values())


def test_waves_of_any_size_give_the_same_tokens():
    whole = {"smallest_rows": 1000, "chunk_length": 30}  # rows that stay
    assert_same(sample(make_engine(max_num_seqs=20, **whole)), reference())
    engine = make_engine(max_num_seqs=0, **whole)
    engine.restore({**engine.state(), "free_bytes": np.array(6e5)})
    assert_same(sample(engine), reference())
    assert max(rows for rows, *_ in shapes_of(engine)) < len(PROMPTS) * SAMPLES  # several waves


def test_a_restored_engine_sizes_its_waves_as_before():
    engine, again = (make_engine(max_num_seqs=0, smallest_rows=1000, chunk_length=30) for _ in range(2))
    engine.restore({**engine.state(), "free_bytes": np.array(6e5)})
    sample(engine)
    again.restore(engine.state())
    sample(engine)
    sample(again)
    rows = lambda shapes: [shape[0] for shape in shapes]  # noqa: E731
    assert set(rows(shapes_of(again))) <= set(rows(shapes_of(engine)))
    found, expected = again.state(), engine.state()
    assert found.keys() == expected.keys() and len(found) == 3  # one purpose
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values)


def test_short_answers_of_one_purpose_do_not_make_waves_of_another_larger():
    engine = make_engine(max_num_seqs=0)
    engine.history(EVALUATE).add(np.ones(64, np.int64))
    assert engine.history(EVALUATE).alive(1) == 0.0 and engine.history(TRAIN).alive(LENGTH - 1) == 1.0
    again = make_engine(max_num_seqs=0)
    again.restore(engine.state())
    assert again.history(EVALUATE).alive(1) == 0.0 and not again.history(TRAIN).known


def test_the_memory_for_keys_and_values_is_the_present_share_of_the_present_devices(monkeypatch):
    measured = []
    monkeypatch.setattr(learnt_sizes, "free_bytes", lambda mesh: measured.append(mesh) or 6e5)
    saved = {**make_engine(max_num_seqs=0).state(), "free_bytes": np.array(6e5)}

    def rows(shape, share):
        engine = make_engine(mesh_of(shape), max_num_seqs=0, smallest_rows=1000, chunk_length=30, memory_share=share)
        engine.restore(saved)
        sample(engine)
        return max(rows for rows, *_ in shapes_of(engine))

    assert rows((1, 1, 1), 0.5) < rows((1, 1, 1), 1.0) and not measured
    rows((8, 1, 1), 1.0)
    assert len(measured) == 1


def test_the_same_shapes_are_compiled_once_whatever_the_sampling():
    compiled = []
    limits = np.arange(len(PROMPTS) * SAMPLES) % 37 + 1
    fixed = {"limits": limits, "prompts": PROMPTS}
    never = tuple(range(ARCH.vocab_size))  # the lengths are the limits
    engine = make_engine(max_num_seqs=48, eos_ids=never, chunk_length=16, smallest_rows=24)
    for _ in range(2):
        sample(engine, sampling=Sampling.create(1.0, 1.0, -1, min_length=99), **fixed)
    listen = lambda event, _seconds, **_: compiled.append(event) if "backend_compile" in event else None  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for how in ((1.0, 1.0, -1), (0.7, 0.9, 20), (0.0, 1.0, -1)):
            sample(engine, sampling=Sampling.create(*how, min_length=99), **fixed)
        assert not compiled
        jax.jit(lambda x: x + len(compiled)).lower(0).compile()
        assert compiled  # the listener hears
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("lookahead", [0, 1])
def test_what_is_compiled_ahead_is_what_is_called(lookahead, monkeypatch):
    engine = make_engine(lookahead=lookahead, max_response_length=70)
    limits = np.where(np.arange(len(PROMPTS) * SAMPLES) % 3, 20, 70)
    called, ahead = [], []
    for name, calls in (("get", called), ("prepare", ahead)):
        method = getattr(engine.programs, name)
        monkeypatch.setattr(
            engine.programs, name, lambda key, lower, m=method, c=calls: (c.append(key), m(key, lower))[1]
        )
    sample(engine, limits=limits)
    called.clear()
    ahead.clear()
    sample(engine, limits=limits)
    assert len(set(called)) > 2 and set(called) <= set(ahead)


def test_decoding_copies_no_cache():
    """Each cache is donated and written in place: a chunk needs less memory besides them than they take."""
    engine = make_engine(max_num_seqs=96, chunk_length=89)
    sample(engine)
    (rows, _, _, window), program = next((key, found.result()) for key, found in engine.programs._found.items())
    cache = 2 * ARCH.num_layers * rows * ARCH.num_kv_heads * window * ARCH.head_dim * 4
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= cache and memory.temp_size_in_bytes < cache / 2


def test_every_response_is_reported_once_when_it_ends():
    reported, ended_then = [], []

    def on_finished(rows, rollout):
        reported.append(rows)
        ended_then.append(rollout.mask[rows].sum(axis=1))

    rollout = sample(make_engine(), on_finished=on_finished)
    rows = np.concatenate(reported)
    assert sorted(rows) == list(range(len(PROMPTS) * SAMPLES)) and len(reported) > 5
    np.testing.assert_array_equal(np.concatenate(ended_then), rollout.mask.sum(axis=1)[rows])
    assert all(np.max(early) <= np.max(late) for early, late in itertools.pairwise(ended_then))


def test_limits_cut_a_response_and_leave_the_others_alone():
    limits = np.arange(len(PROMPTS) * SAMPLES) % 30 + 1
    rollout = sample(make_engine(), limits=limits)
    expected = np.minimum(reference().mask.sum(axis=1), limits)
    np.testing.assert_array_equal(rollout.mask.sum(axis=1), expected)
    np.testing.assert_array_equal(rollout.responses[rollout.mask], reference().responses[rollout.mask])
    cut = expected < reference().mask.sum(axis=1)
    assert cut.any() and not rollout.finished[cut].any()


def test_a_response_ends_where_the_stop_rule_says():
    def stop(tokens, looked_at):
        return next((i + 1 for i in range(looked_at, len(tokens)) if tokens[i] in (10, 11)), None)

    whole = reference()
    rollout = sample(make_engine(), stop=stop)
    for row in range(len(whole.mask)):
        tokens = whole.responses[row][whole.mask[row]].tolist()
        kept = stop(tokens, 0) or len(tokens)
        assert rollout.responses[row][rollout.mask[row]].tolist() == tokens[:kept]
        assert rollout.finished[row] == (whole.finished[row] or kept < len(tokens))
        assert not rollout.logprobs[row, kept:].any() and (rollout.responses[row, kept:] == PAD).all()
    assert (rollout.mask.sum(axis=1) < whole.mask.sum(axis=1)).any()


def test_a_prompt_number_decides_the_draws_and_no_two_share_them():
    prompts = [[7, 8]] * 8
    engine = make_engine(max_response_length=24)
    sampled = functools.partial(sample, engine, prompts=prompts, sampling=Sampling.create(1.0, 1.0, -1, min_length=24))
    rollout = sampled(numbers=list(range(8)))
    assert len({row.tobytes() for row in rollout.responses}) == len(rollout.responses)
    later = sampled(numbers=list(range(8, 16)))
    assert not {row.tobytes() for row in rollout.responses} & {row.tobytes() for row in later.responses}
    swapped = sampled(numbers=[3, *range(9, 16)])
    np.testing.assert_array_equal(swapped.responses[:SAMPLES], rollout.responses[3 * SAMPLES : 4 * SAMPLES])


def next_token_probabilities(tokens, *, temperature, top_p):
    @jax.jit
    def softmax(tokens):
        mask, params = jnp.ones(tokens.shape, bool), init_params(ARCH, 0)
        scores = logits(params, forward(params, tokens, positions_of(mask), mask, ARCH), ARCH)[0, -1] / temperature
        return jax.nn.softmax(scores)

    probabilities = np.asarray(softmax(np.array([tokens])), np.float64)
    order = np.argsort(-probabilities)
    before = np.cumsum(probabilities[order]) - probabilities[order]
    probabilities[order[before >= top_p]] = 0
    return probabilities / probabilities.sum()


@pytest.mark.short("1.0-1.0")
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 0.8)])
def test_the_sampled_distribution_is_the_models(temperature, top_p):
    """Chi-square of the first token, and of the second one after the most frequent first."""
    engine = make_engine(max_response_length=2)
    rollout = sample(engine, prompts=[[7, 9, 11]], num_samples=6000, sampling=Sampling.create(temperature, top_p, -1))
    how = {"temperature": temperature, "top_p": top_p}
    first = rollout.responses[:, 0]
    common = int(np.bincount(first[~np.isin(first, EOS)]).argmax())
    second = rollout.responses[first == common, 1]
    for drawn, prompt in ((first, [7, 9, 11]), (second, [7, 9, 11, common])):
        expected = next_token_probabilities(prompt, **how) * len(drawn)
        counts = np.bincount(drawn, minlength=ARCH.vocab_size)
        assert counts[expected == 0].sum() == 0
        often = expected >= 5
        square = np.sum((counts[often] - expected[often]) ** 2 / expected[often])
        assert square < often.sum() + 4 * np.sqrt(2 * often.sum()), prompt


@pytest.mark.short("llama3_rope_scaled", "qwen3_qknorm")
@pytest.mark.parametrize("name", ["llama3_rope_scaled", "llama_tied", "qwen2_bias_tied", "qwen3_qknorm"])
def test_greedy_decoding_equals_transformers(name):
    """tests/rollout/data/greedy.npz: transformers' generate(do_sample=False) on the same weights and prompts."""
    golden = np.load(Path(__file__).parent / "data" / "greedy.npz")
    prompts = [row[row >= 0].tolist() for row in golden[f"{name}_prompts"]]
    expected = golden[f"{name}_responses"]
    arch = read_model_architecture(DATA / name)
    params = unstack_layers(load_params(DATA / name, arch, lambda weight, array: array), arch)
    engine = make_engine(arch=arch, eos_ids=(2,), max_response_length=expected.shape[1])
    found = sample(engine, params=params, prompts=prompts, num_samples=1, sampling=Sampling.create(0.0, 1.0, -1))
    np.testing.assert_array_equal(found.responses, expected)


@pytest.mark.slow
def test_bfloat16_matrices_keep_the_shape_of_things():
    rollout = sample(make_engine(max_response_length=9), params=host_params("bfloat16"))
    assert (rollout.responses == reference().responses[:, :9]).mean() > 0.8 and np.isfinite(rollout.logprobs).all()
