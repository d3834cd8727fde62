"""Partial rollouts: a response in segments is the same response, and a run with them resumes to the same bits."""

from contextlib import nullcontext

import jax
import numpy as np
import pytest
from rollout.small_rollouts import FREE, SAMPLES, dense
from shapes import mesh_of
from small_run import Killed, assert_same_policy, at_call, kill, rows_without_clock, small_config

from dapo_jax.data.prompts import PromptSet
from dapo_jax.rollout.sampling import TRAIN
from dapo_jax.run.sampler import Sampler
from dapo_jax.run.segments import SegmentedRollout, Segments
from dapo_jax.training import step as step_module
from dapo_jax.training.loop import train

FILTER = "algorithm.filter_groups"
SEGMENTED = {
    "rollout.segment_length": 3,
    "data.max_response_length": 8,
    f"{FILTER}.leftover": "carry",
    f"{FILTER}.leftover_max_staleness": 3,
    "trainer.total_training_steps": 6,
    "trainer.test_freq": -1,
    "trainer.val_before_train": False,
}


@pytest.mark.short("pages-(2, 2, 2)-40")
@pytest.mark.long("stretches-(1, 1, 1)-25", "pages-(2, 2, 2)-7")  # each kind, and the most segments once
@pytest.mark.parametrize("length", [7, 25, 40])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("kind", ["pages", "stretches"])
def test_a_policy_that_does_not_change_draws_whole_responses(kind, shape, length, reference):
    built, segments = (
        dense().engine(kind, mesh_of(shape), max_num_seqs=24, lookahead=1),
        Segments(length, dense().length),
    )
    sampler = Sampler(None, built, built.settings.mesh, (), lambda _: nullcontext())
    numbers, prompts = [4, 0, 15, 11, 12], PromptSet([], dense().prompts)
    with jax.set_mesh(sampler.mesh):
        request = sampler.request(dense().on(sampler.mesh), SAMPLES, TRAIN, FREE)
        rollout = SegmentedRollout(sampler, request, prompts, int, None, segments=segments, begun=None)
        groups = rollout.first_segments(numbers)
        for step in range(1, -(-dense().length // length)):
            assert (groups.mask.sum(axis=-1) <= step * length).all()
            rollout.version = step
            groups = rollout.continued(groups)
    built.close()
    assert segments.ended(groups).all()
    for name in ("responses", "mask", "finished", "logprobs"):
        found = getattr(groups, name)
        expected = getattr(reference, name).reshape(-1, SAMPLES, *found.shape[2:])[numbers]
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 if name == "logprobs" else 0)


@pytest.mark.slow
def test_a_run_in_segments_is_killed_and_resumes_and_does_not_depend_on_the_slots(tmp_path, monkeypatch):
    config = small_config(tmp_path / "parts", **SEGMENTED)
    whole = train(small_config(tmp_path / "whole", **SEGMENTED))
    with monkeypatch.context() as patch:
        at_call(patch, step_module, "sample_groups", 4, kill)
        with pytest.raises(Killed):
            train(config)
    assert_same_policy(train(config), jax.device_get(whole.actor.params))
    rows = rows_without_clock(tmp_path / "whole")
    assert rows_without_clock(tmp_path / "parts") == rows
    first = next(row for row in rows if row["step"])
    assert first["dynamic_sampling/num_begun"] > 0 and first["dynamic_sampling/partial_step"] == 1
    versions = {row["step"]: row["rollout/model_version"] for row in rows if "rollout/model_version" in row}
    assert len(versions) > 2 and all(version == step - 1 for step, version in versions.items())
    trained = [row for row in rows if "sample/token_staleness/max" in row]
    assert len(trained) >= 3
    for row in trained:
        least, mean = row["sample/token_staleness/min"], row["sample/token_staleness/mean"]
        assert least <= mean <= row["sample/staleness/max"] <= 3
    other = {**SEGMENTED, "rollout.segment_length": 4, "trainer.total_training_steps": 7}
    with pytest.raises(ValueError, match="begun with another rollout.segment_length than the run's 4"):
        train(small_config(tmp_path / "parts", **other))
    train(small_config(tmp_path / "slots", **SEGMENTED, **{"rollout.max_num_seqs": 16}))
    for found, expected in zip(rows_without_clock(tmp_path / "slots"), rows, strict=True):
        assert found.keys() == expected.keys()
        for name in ("dynamic_sampling/trained_tokens", "data/prompts_consumed", "dynamic_sampling/num_begun"):
            assert found.get(name) == expected.get(name)
        assert found.get("actor/pg_loss", 0) == pytest.approx(expected.get("actor/pg_loss", 0), abs=1e-5)
