"""Partial rollouts: which groups a step begins, continues and trains on."""

import dataclasses
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from dynamic_sampling.small_groups import NUM_ROWS, experience, numbers_of, round_of, start

from dapo_jax.config.sections import FilterGroupsConfig
from dapo_jax.data.prompts import PromptSet
from dapo_jax.data.tokenizer import character_tokenizer
from dapo_jax.dynamic_sampling.accumulation import Found
from dapo_jax.dynamic_sampling.prompt_stream import PromptSource
from dapo_jax.dynamic_sampling.schedule import Schedule
from dapo_jax.rollout.responses import Request
from dapo_jax.rollout.sampling import TRAIN, Sampling
from dapo_jax.run.segments import SegmentedRollout, Segments
from dapo_jax.training.metrics import sampling_metrics
from dapo_jax.training.state import RunState, restored_arrays, saved_arrays
from dapo_jax.training.step import accumulate

SEGMENTS = Segments(15, 40)  # a response takes up to three steps
REQUEST = Request(None, 2, TRAIN, Sampling.create(1.0, 1.0, -1))
SOURCE = PromptSource(lambda number: number % NUM_ROWS, NUM_ROWS)


def length_of(number):
    """[2] tokens of the two responses to a prompt; one group in four is at the limit."""
    return np.minimum(np.random.default_rng([5, number]).integers(1, 54, 2), 40)


def keeps(number):
    return np.random.default_rng([3, number]).random() < 0.5


class MadeUpSegments(SegmentedRollout):
    """Groups of two responses, which advance by 15 tokens per step."""

    def __init__(self, step, begun):
        stage = SimpleNamespace(stage=lambda name: nullcontext())
        super().__init__(stage, REQUEST, None, int, None, step - 1, segments=SEGMENTS, begun=begun)
        self.numbers = []

    def drawn(self, numbers, versions):
        limits = (self.version + 1 - versions) * 15
        lengths = np.array([length_of(number) for number in numbers])
        groups = experience(numbers, np.zeros(lengths.shape))
        mask = np.arange(40) < np.minimum(lengths, limits[:, None])[..., None]
        return dataclasses.replace(groups, mask=mask, finished=lengths <= limits[:, None], versions=versions)

    def first_segments(self, numbers):
        self.numbers += numbers
        return self.drawn(np.array(numbers), np.full(len(numbers), self.version))

    def continued(self, groups):
        assert not SEGMENTS.ended(groups).all(axis=1).any(), "a group whose responses have ended is not continued"
        return self.drawn(groups.numbers, groups.versions)

    def verified(self, groups):
        return groups


def judged(groups):
    keep = np.array([keeps(number) for number in groups.numbers])
    round_ = round_of(groups.numbers.tolist(), keep, 2)
    whole = dataclasses.replace(round_.experience, mask=groups.mask, versions=groups.versions)
    return dataclasses.replace(round_, experience=whole)


def run(steps, state=None, first=1, source=SOURCE, **changes):
    state, found = state or start(), []
    options = FilterGroupsConfig(**{"leftover": "carry", "leftover_max_staleness": 4, **changes})
    for step in range(first, first + steps):
        rollout = MadeUpSegments(step, state.begun)
        sizes = {"target": 8, "gen_batch_size": 8, "segment_steps": 3, "step": step}
        accepted = accumulate(rollout, judged, Found(state, source, options, **sizes))
        found.append((accepted, rollout.numbers))
        state = accepted.state
    return found


def groups_to_begin(target, *, carried, keep_rate):
    return Schedule(FilterGroupsConfig(), target, 8, carried, keep_rate, segment_steps=3).groups_to_begin


def test_a_step_begins_what_a_step_trains_on_and_a_third_of_what_the_stock_lacks():
    assert groups_to_begin(16, carried=4, keep_rate=0.5) == 32  # the stock is 4 groups
    assert groups_to_begin(16, carried=0, keep_rate=0.5) == 34  # (16 + 4 / 3) / 0.5, in whole pairs
    assert groups_to_begin(16, carried=16, keep_rate=0.5) == 24
    assert groups_to_begin(16, carried=80, keep_rate=0.5) == 0


def test_every_group_is_judged_once_when_its_last_response_has_ended():
    found, judged = run(40), []
    for step, (accepted, _) in enumerate(found, 1):
        for outcomes in (round_.outcomes for round_ in accepted.rounds):
            longest = outcomes.lengths.max(axis=1)
            assert (outcomes.versions + -(-longest // 15) == step).all()
            assert (longest == [length_of(number).max() for number in outcomes.numbers]).all()
            judged += outcomes.numbers.tolist()
    begun = [number for _, numbers in found for number in numbers]
    assert begun == list(range(len(begun)))
    under_way = found[-1][0].state.begun.numbers.tolist()
    assert sorted(judged + under_way) == begun and under_way == sorted(under_way)


def test_groups_are_trained_on_in_order_and_never_too_old():
    found = run(40)
    trained = [number for one, _ in found if one.experience for number in one.experience.numbers]
    assert len(set(trained)) == len(trained) and all(map(keeps, trained))
    for step, (accepted, _) in enumerate(found, 1):
        if accepted.experience is not None:
            staleness = step - 1 - accepted.experience.versions
            assert 0 <= staleness.min() and staleness.max() <= 4
        judged = accepted.rounds[0].outcomes.numbers.tolist() if accepted.rounds else []
        assert judged == sorted(judged), "those begun first come first"
        if accepted.experience is not None:
            carried = [number not in judged for number in accepted.experience.numbers]
            assert carried == sorted(carried, reverse=True), "carried groups come before those of the step"
    assert [accepted.outcome for accepted, _ in found[:2]] != ["full"] * 2
    assert np.mean([accepted.outcome == "full" for accepted, _ in found[4:]]) > 0.85
    assert all(begun for _, begun in found), "the stock does not swing"


def test_trained_groups_are_as_long_as_all_that_are_kept():
    """What ends first is trained on first, but in the long run everything is."""
    trained = [accepted.experience for accepted, _ in run(80) if accepted.experience]
    lengths = [groups.num_tokens / groups.finished.size for groups in trained]
    assert np.mean(lengths) == pytest.approx(np.mean([length_of(n) for n in range(800) if keeps(n)]), rel=0.05)


def test_metrics_count_what_is_drawn_and_what_is_under_way():
    found = run(5)
    drawn = sum(sampling_metrics(accepted)["dynamic_sampling/generated_tokens"] for accepted, _ in found)
    judged = sum(round_.outcomes.lengths.sum() for accepted, _ in found for round_ in accepted.rounds)
    assert drawn == judged + found[-1][0].state.begun.num_tokens
    accepted, _ = found[2]
    metrics = sampling_metrics(accepted)
    assert metrics["dynamic_sampling/num_begun"] == len(accepted.state.begun) > 0
    assert metrics["dynamic_sampling/num_skipped_uniform"] == metrics["dynamic_sampling/num_requeued"] == 0


def test_the_policy_of_each_token_follows_from_its_place():
    groups = dataclasses.replace(experience([0, 1], np.zeros((2, 1)), lengths=40), versions=np.array([3, 7]))
    versions = SEGMENTS.token_versions(groups)
    assert versions[0, 0].tolist() == [3] * 15 + [4] * 15 + [5] * 10 and (versions[1] == versions[0] + 4).all()


def test_a_restart_between_two_steps_changes_nothing():
    """Carried groups, groups under way and all else that a stream knows go through a checkpoint's arrays."""
    whole, before = run(12), dataclasses.replace(run(5)[-1][0].state, lowest={"sums/1": {"score": -2.0}})
    assert before.begun is not None and before.carried is not None
    prompts = PromptSet([], [[1]] * NUM_ROWS)
    state, _ = restored_arrays(saved_arrays(RunState(None, None, before, {})), prompts, character_tokenizer())
    for name in ("next_prompt", "keep_rate", "lowest"):
        assert getattr(state, name) == getattr(before, name), name
    for (found, begun), (expected, numbers) in zip(run(7, state=state, first=6), whole[5:], strict=True):
        assert begun == numbers and (found.experience is None) == (expected.experience is None)
        assert found.experience is None or numbers_of(found) == numbers_of(expected)
