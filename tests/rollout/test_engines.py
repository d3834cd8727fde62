"""What both engines have in common; which of them a run has (rollout.engine)."""

import dataclasses
import logging
from types import SimpleNamespace

import numpy as np
import pytest
from rollout.small_rollouts import FREE, PAD, SAMPLES, assert_same, dense
from shapes import ARCH, mesh_of, one_device_mesh
from small_policy import engine_settings

from dapo_jax.data.containers import Rollout
from dapo_jax.errors import InputError
from dapo_jax.models import paged_attention_gpu, paged_attention_tpu
from dapo_jax.models.paged_attention import attend_gathered
from dapo_jax.rollout import engines
from dapo_jax.rollout.engine import Begun
from dapo_jax.rollout.engines import build_engine, page_attention
from dapo_jax.rollout.sampling import Sampling
from dapo_jax.rollout.slots import SlotEngine
from dapo_jax.rollout.waves import WaveEngine

KINDS = ("waves", "slots")
WAYS = [(1.0, 1.0, -1), (0.0, 1.0, -1), (0.7, 0.9, 20), (1.0, 1.0, -1, 12)]


@pytest.mark.parametrize(
    ("wanted", "kind", "reason"),
    [("auto", WaveEngine, "waves.*auto: "), ("waves", WaveEngine, "waves"), ("slots", SlotEngine, "slots")],
)
def test_the_log_says_which_engine_and_why(wanted, kind, reason, caplog):
    caplog.set_level(logging.INFO)
    assert isinstance(build_engine(wanted, engine_settings(one_device_mesh())), kind)
    (line,) = caplog.messages
    assert line.startswith(f"rollout.engine={reason.partition('.')[0]}") and ("auto" in line) == (wanted == "auto")


@pytest.mark.parametrize(
    ("device", "size", "length", "kernel"),
    [
        ("cpu", 20, 7, attend_gathered),
        ("tpu", 64, 48, paged_attention_tpu.attend),
        ("tpu", 192, 16, paged_attention_tpu.attend),
        ("tpu", 96, 32, None),
        ("tpu", 128, 8, None),
        ("gpu", 64, 32, paged_attention_gpu.attend),
        ("gpu", 96, 32, None),
        ("gpu", 128, 48, None),
    ],
)
def test_attention_to_pages_fits_the_devices(device, size, length, kernel, monkeypatch):
    monkeypatch.setattr(engines, "platform", lambda mesh: device)
    arch = dataclasses.replace(ARCH, head_dim=size)
    settings = SimpleNamespace(mesh=None, arch=arch, chunk_length=length)
    if kernel is None:
        with pytest.raises(InputError, match=f"on a {device.upper()}, not {size} and {length}: set"):
            page_attention(settings)  # pyright: ignore[reportArgumentType]
    else:
        assert page_attention(settings) is kernel  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_way_to_draw_is_that_of_one_pass_over_each_sequence(kind, way):
    """Free, greedy, filtered, and with a minimum length, which only some of the rows have reached."""
    sampling = Sampling.create(*way)
    dense().assert_drawn(dense().sample(dense().engine(kind, lookahead=1), sampling=sampling), sampling)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_one_sample_of_a_prompt_is_the_first_of_several(kind, reference):
    found = dense().sample(dense().engine(kind), num_samples=1)
    assert_same(found, reference, slice(None, None, SAMPLES))


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


@pytest.mark.short("waves-(1, 1, 1)-(1.0, 1.0, -1)", "slots-(2, 2, 2)-(1.0, 1.0, -1)")
@pytest.mark.long("slots-(1, 1, 1)")  # also with a minimum length
@pytest.mark.parametrize("way", [WAYS[0], WAYS[3]], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_response_in_segments_is_the_same_response(kind, shape, way, reference):
    """Begun responses have other lengths, one of them ends at once; sample and position address the draws."""
    sampling = Sampling.create(*way)
    whole = reference if sampling == FREE else dense().sample(dense().slots(), sampling=sampling)
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
