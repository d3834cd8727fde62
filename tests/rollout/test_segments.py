"""Partial rollouts: a response in segments is the same response, and a run with them resumes to the same bits."""

import functools
from contextlib import nullcontext

import jax
import numpy as np
import pytest
from rollout.test_slots import LENGTH, PROMPTS, SAMPLES, host_params, settings_of, slot_engine, waves
from shapes import mesh_of, one_device_mesh
from small_run import Killed, assert_same_policy, at_call, kill, rows_without_clock, small_config

from dapo_jax import step as step_module
from dapo_jax.data.prompts import PromptSet
from dapo_jax.parallel.sharding import replicated
from dapo_jax.rollout.sampler import Sampler
from dapo_jax.rollout.sampling import Sampling
from dapo_jax.rollout.segments import Segments, begin_groups, continue_groups
from dapo_jax.rollout.waves import WaveEngine
from dapo_jax.training import train

FILTER = "algorithm.filter_groups"
SEGMENTED = {
    "rollout.segment_length": 3,
    "data.max_response_length": 8,
    f"{FILTER}.leftover": "carry",
    f"{FILTER}.leftover_max_staleness": 3,
    "trainer.total_training_steps": 6,
}
ENGINES = {
    "waves": lambda: WaveEngine(settings_of(one_device_mesh(), max_num_seqs=24)),
    "slots": functools.partial(slot_engine, lookahead=1),
    "slots, eight devices": functools.partial(slot_engine, mesh_of((2, 2, 2))),
}


@pytest.mark.short("7-slots, eight devices")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("length", [7, 25])
def test_a_policy_that_does_not_change_draws_whole_responses(engine, length):
    built, segments, expected = ENGINES[engine](), Segments(length, LENGTH), waves()
    sampler = Sampler(None, built, built.settings.mesh, (), lambda _: nullcontext())
    options = {"sampling": Sampling.create(1.0, 1.0, -1)}
    numbers, prompts = [4, 0, 17, 11, 12], PromptSet([], PROMPTS)
    with jax.set_mesh(sampler.mesh):
        weights = jax.device_put(host_params(), replicated(sampler.mesh))
        options |= {"num_samples": SAMPLES, "version": 0}
        groups = begin_groups(sampler, weights, prompts, numbers, numbers, segments, **options)
        for step in range(1, -(-LENGTH // length)):
            assert (groups.mask.sum(axis=-1) <= step * length).all()
            groups = continue_groups(sampler, weights, groups, segments, sampling=options["sampling"])
    built.close()
    assert segments.ended(groups).all()
    rows = (np.array(numbers)[:, None] * SAMPLES + np.arange(SAMPLES)).reshape(-1)
    np.testing.assert_array_equal(groups.responses.reshape(len(rows), -1), expected.responses[rows])
    np.testing.assert_array_equal(groups.mask.reshape(len(rows), -1), expected.mask[rows])
    np.testing.assert_array_equal(groups.finished.reshape(-1), expected.finished[rows])
    np.testing.assert_allclose(groups.logprobs.reshape(len(rows), -1), expected.logprobs[rows], atol=1e-5)


@pytest.mark.slow
def test_a_run_in_segments_is_killed_and_resumes(tmp_path, monkeypatch):
    config = small_config(tmp_path / "parts", **SEGMENTED)
    whole = train(small_config(tmp_path / "whole", **SEGMENTED))
    with monkeypatch.context() as patch:
        at_call(patch, step_module, "sample_groups", 4, kill)
        with pytest.raises(Killed):
            train(config)
    assert_same_policy(train(config), jax.device_get(whole.actor.params))
    rows = rows_without_clock(tmp_path / "whole")
    assert rows_without_clock(tmp_path / "parts") == rows
    assert rows[1]["dynamic_sampling/num_begun"] > 0 and rows[1]["dynamic_sampling/partial_step"] == 1
    trained = [row for row in rows if "sample/token_staleness/max" in row]
    assert len(trained) >= 3
    for row in trained:
        least, mean = row["sample/token_staleness/min"], row["sample/token_staleness/mean"]
        assert least <= mean <= row["sample/staleness/max"] <= 3
    other = {**SEGMENTED, "rollout.segment_length": 4, "trainer.total_training_steps": 7}
    with pytest.raises(ValueError, match="begun with another rollout.segment_length than the run's 4"):
        train(small_config(tmp_path / "parts", **other))


@pytest.mark.slow
def test_segments_do_not_depend_on_the_engine(tmp_path):
    for name, changes in (("waves", {}), ("slots", {"rollout.engine": "slots", "rollout.max_num_seqs": 16})):
        train(small_config(tmp_path / name, **SEGMENTED, **changes))
    slots, rows = rows_without_clock(tmp_path / "slots"), rows_without_clock(tmp_path / "waves")
    for found, expected in zip(slots, rows, strict=True):
        assert found.keys() == expected.keys()
        for name in ("dynamic_sampling/trained_tokens", "data/prompts_consumed", "dynamic_sampling/num_begun"):
            assert found.get(name) == expected.get(name)
        assert found.get("actor/pg_loss", 0) == pytest.approx(expected.get("actor/pg_loss", 0), abs=1e-5)
