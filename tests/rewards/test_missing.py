"""Verdicts that never came, and responses that made their verifier fail: from groups to advantages and metrics."""

import dataclasses

import jax
import numpy as np
import pytest
from dynamic_sampling.small_groups import NUM_ROWS, MadeUp, accumulated, experience, options_of, start
from shapes import mesh_of
from small_run import assert_same_policy, copied, rows_without_clock, small_config, unsure_function

from dapo_jax.algorithms.kl import ROUNDING, ROUNDING_BF16
from dapo_jax.config.sections import (
    DataConfig,
    FilterGroupsConfig,
    LengthRewardConfig,
    OverlongBufferConfig,
    RewardModelConfig,
)
from dapo_jax.data.experience import concatenate, from_arrays, to_arrays
from dapo_jax.data.prompts import PromptSet
from dapo_jax.data.rows import PromptRow
from dapo_jax.data.tokenizer import character_tokenizer
from dapo_jax.dynamic_sampling.rounds import Round, filter_groups, filtered_counts
from dapo_jax.learner.batch import make_batch
from dapo_jax.learner.update import sequence_lengths
from dapo_jax.monitor.records import read_metrics
from dapo_jax.monitor.statistics import evaluation_metrics, group_reward_metrics
from dapo_jax.rewards.lowest import lowest_given, with_lowest
from dapo_jax.rewards.scoring import add_rewards
from dapo_jax.run.held_out import _Measured, mean_accuracy
from dapo_jax.run.parts import open_run
from dapo_jax.training.loop import train
from dapo_jax.training.metrics import experience_metrics, sampling_metrics
from dapo_jax.training.sample_texts import step_row
from dapo_jax.training.state import first_state
from dapo_jax.training.step import sample_batch

NAN = float("nan")
NO_BUFFER = OverlongBufferConfig()
SUMS = PromptSet([PromptRow("p", "sums", "1", {})] * NUM_ROWS, [[1]] * NUM_ROWS)
KL = {
    "algorithm.use_kl_in_reward": True,
    "algorithm.filter_groups.metric": "seq_final_reward",
    "trainer.total_training_steps": 1,
    "trainer.val_before_train": False,
    "trainer.test_freq": -1,
}
CARRIED = {"algorithm.filter_groups.leftover": "carry", "algorithm.filter_groups.leftover_max_staleness": 3}


@pytest.fixture
def mesh():
    mesh = mesh_of((8, 1, 1))
    with jax.set_mesh(mesh):
        yield mesh


def groups_of(acc, *, failed=None, lengths=2, first=0):
    """Groups with NaN for responses without a verdict."""
    groups = experience(np.arange(first, first + len(acc)), acc, lengths=lengths)
    return dataclasses.replace(groups, failed=np.isnan(groups.scores["acc"]) if failed is None else np.array(failed))


def shaped(groups, mesh, **length):
    return add_rewards(groups, NO_BUFFER, LengthRewardConfig(**length), max_response_length=40, mesh=mesh)


def test_a_judge_that_refuses_some_requests_makes_no_group_mixed(mesh):
    """8 groups of right answers; before, each of the 5 groups with a refusal was mixed."""
    acc = np.ones((8, 8))
    acc[[0, 2, 3, 5, 7], [1, 4, 0, 7, 2]] = NAN
    found = filter_groups(groups_of(acc), FilterGroupsConfig(), mesh)
    assert not found.keep.any() and not found.metric_std.any()
    assert filtered_counts([found.verdicts]) == {"all_correct": 8, "all_wrong": 0, "other": 0}


@pytest.mark.parametrize("enable", [True, False])
def test_a_group_with_fewer_than_two_verdicts_is_dropped_also_without_a_filter(mesh, enable):
    acc = [[1, 0, NAN], [1, NAN, NAN], [NAN, NAN, NAN], [1, 1, NAN]]
    options = FilterGroupsConfig(enable=enable)
    found = filter_groups(groups_of(acc), options, mesh)
    assert found.keep.tolist() == [True, False, False, not enable] and found.metric_std[0] == 0.5 * enable
    below = dataclasses.replace(options, rule="mean_range", filter_low=-1.0, filter_high=9.0)
    assert filter_groups(groups_of(acc), below, mesh).keep.tolist() == [True, False, False, True]
    assert filter_groups(groups_of([[1], [NAN]]), options, mesh).keep.tolist() == [True, False]


def test_neither_rewards_nor_length_rewards_of_the_others_depend_on_it(mesh):
    acc, lengths = [[1, 0, NAN, 1], [1, 0, NAN, 0]], [[4, 6, 30, 8], [4, 6, 1, 8]]
    found = shaped(groups_of(acc, lengths=lengths), mesh, form="group")
    alone = shaped(groups_of(np.delete(acc, 2, 1), lengths=np.delete(lengths, 2, 1)), mesh, form="group")
    for name, values in alone.scores.items():
        np.testing.assert_array_equal(np.delete(found.scores[name], 2, 1), values)
        assert np.isnan(found.scores[name][:, 2]).all() and found.scores[name].dtype == values.dtype


def test_a_checkpoint_keeps_what_is_missing_and_an_older_one_misses_nothing():
    groups = groups_of([[1, NAN], [0, 1]])
    tokens = PromptSet([], [[1]] * NUM_ROWS)
    found = from_arrays(to_arrays(groups), tokens, character_tokenizer())
    np.testing.assert_array_equal(found.known, [[True, False], [True, True]])
    assert concatenate([found, groups]).known.sum() == 6
    assert from_arrays(to_arrays(experience([0], [[0, 1]])), tokens, character_tokenizer()).known.all()


def test_a_time_out_of_a_function_of_minus_1_and_1_is_not_favoured():
    """It had a score of 0: more than a wrong answer, -1."""
    groups = groups_of([[1, -1, 0, -1], [1, 1, 0, 1]], failed=[[0, 0, 1, 0], [0, 0, 1, 0]])
    score = with_lowest(groups, SUMS, {}).scores["score"]
    assert score[0].tolist() == [1, -1, -1, -1] and score[1].tolist() == [1, 1, 0, 1]
    later = with_lowest(groups, SUMS, {"sums": {"score": -3.0, "acc": -1.0, "form": -0.5}, "others": {"score": -9.0}})
    assert later.scores["score"][:, 2].tolist() == [-3, -3] and later.scores["acc"][:, 2].tolist() == [-1, -1]
    np.testing.assert_array_equal(later.scores["form"], [[NAN, NAN, -0.5, NAN]] * 2)
    assert with_lowest(groups_of([[1, NAN, 1]]), SUMS, {"sums": {"score": -3.0}}).scores["score"][0, 0] == 1, (
        "no verdict"
    )


def test_what_is_counted_of_an_episode_is_not_lowered():
    """A reward function that failed on an episode of five turns had it count two, the fewest of its group."""
    counted = {name: np.array([[2.0, 5.0]]) for name in ("num_turns", "observation_tokens")}
    groups = groups_of([[1, 0]], failed=[[0, 1]]).with_scores(**counted)
    found = with_lowest(groups, SUMS, {}).scores
    assert all(found[name].tolist() == [[2.0, 5.0]] for name in counted)
    assert lowest_given(groups.scores, groups.failed, ["sums"]) == [("sums", {"score": 1.0, "acc": 1.0})]


def judged(numbers, acc_of):
    groups = groups_of([acc_of(number) for number in numbers])
    groups = dataclasses.replace(groups, numbers=np.array(numbers), rows=np.array(numbers))
    keep = np.nanmax(groups.scores["acc"], axis=1) > np.nanmin(groups.scores["acc"], axis=1)
    return Round(
        groups,
        keep,
        np.zeros(len(keep)),
        lowest_given(groups.scores, groups.failed, ["ab"[number % 2] for number in numbers]),
    )


@pytest.mark.parametrize("size", [1, 3, 4, 7])
def test_history_and_lowest_scores_follow_from_the_groups_up_to_the_cut_alone(size):
    """Whatever is sampled at once: 0 and 4 are mixed, 2 has a failure, 5 and 6 come after the cut."""
    acc = [[1, -1], [1, 1], [1, NAN], [0, 0], [1, -2], [1, 1], [-9, 1]]
    rollout = MadeUp(lambda numbers: judged(numbers, lambda number: acc[number % 7]))
    accepted = accumulated(rollout, start(), **options_of(target=2, size=size))
    assert accepted.experience.numbers.tolist() == [0, 4] and accepted.state.next_prompt == 5
    assert accepted.state.lowest == {"a": {"acc": -2.0, "score": -2.0}, "b": {"acc": 0.0, "score": 0.0}}
    assert accepted.state.history.uniform_in_a_row[:7].tolist() == [0, 1, 0, 1, 0, 0, 0]
    assert np.isnan(accepted.state.history.accuracy[2])


def test_a_fall_back_uses_no_group_with_too_few_verdicts():
    options = options_of(target=2, size=2, limit=1, on_limit="fallback_unfiltered")
    accs = [[1, 1, NAN], [1, NAN, NAN]]
    accepted = accumulated(MadeUp(lambda numbers: judged(numbers, accs.__getitem__)), start(), **options)
    assert accepted.experience.numbers.tolist() == [0] and accepted.outcome == "fallback"


class Order:
    epoch = staticmethod(lambda number: 0)


def test_metrics_are_those_of_the_verdicts(mesh):
    groups = shaped(groups_of([[1, 0, NAN], [1, 1, NAN]], lengths=[[2, 4, 9], [3, 3, 3]]), mesh)
    round_ = filter_groups(groups, FilterGroupsConfig(), mesh)
    accepted = accumulated(MadeUp(lambda _: round_), start(), **options_of(target=1, size=2))
    metrics = experience_metrics(accepted, DataConfig(), Order()) | sampling_metrics(accepted)
    assert (metrics["reward/num_errors"], metrics["reward/num_missing"]) == (2, 2)
    assert metrics["reward/unfiltered_mean"] == 0.75 and metrics["dynamic_sampling/uniform_share"] == 0.5
    assert metrics["critic/score/mean"] == 0.5 and metrics["rollout/acc/mean"] == 0.75
    assert (metrics["dynamic_sampling/generated_tokens"], metrics["dynamic_sampling/trained_tokens"]) == (24, 6)
    assert metrics["response_length/max"] == 4 and metrics["experience_pipeline/experience_count"] == 2
    assert not any(np.isnan(value) for value in metrics.values())
    rewards = np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32)
    plain = group_reward_metrics(rewards)
    assert plain["experience_pipeline/group_advantages/reward_mean/mean"] == float(np.mean(rewards.mean(axis=1)))
    assert plain["experience_pipeline/group_advantages/reward_std/mean"] == float(np.mean(rewards.std(axis=1)))


def test_lengths_and_divergences_without_a_verdict_are_in_no_statistic(mesh):
    def said_of(acc, lengths):
        groups = shaped(groups_of(acc, lengths=lengths), mesh)
        by_length = np.where(groups.mask, groups.mask.sum(axis=-1, keepdims=True), 0.0)
        groups = dataclasses.replace(groups, kl=by_length, logprobs=-by_length)
        round_ = Round(groups, np.ones(len(acc), bool), np.zeros(len(acc)))
        accepted = accumulated(MadeUp(lambda _: round_), start(), **options_of(target=3, size=3))
        metrics = experience_metrics(accepted, DataConfig(), Order())
        names = [name for name in metrics if name.startswith(("response_length", "critic", "experience_pipeline/exp"))]
        histograms = step_row(accepted, {}, {}, [], character_tokenizer(), num_samples=0)["histograms"]
        return {name: metrics[name] for name in names}, histograms, accepted.experience.sequence_kl

    acc, lengths = [[1, 0, NAN, 1], [1, 0, NAN, 0], [NAN, 1, 0, 1]], [[4, 6, 30, 8], [9, 6, 1, 8], [20, 5, 5, 7]]
    found = said_of(acc, lengths)
    expected = said_of([[1, 0, 1], [1, 0, 0], [1, 0, 1]], [[4, 6, 8], [9, 6, 8], [5, 5, 7]])
    assert found == expected and 0 < found[0]["response_length/within_prompts"] < 1


def test_an_evaluation_is_the_mean_over_verdicts_and_no_number_without_any():
    found = evaluation_metrics("eval/a", {"acc": np.array([[1, NAN], [0, 1]]), "score": np.full((2, 2), NAN)})
    assert found["eval/a/acc/mean@2"] == 0.75 and not any("score" in name for name in found)
    rest = {"eval/b/finished_task_count": 2.0, "eval/b/score/mean@2": 1.0, "eval/b/acc/mean@2": 1.0}
    assert mean_accuracy(rest) == 1.0 and mean_accuracy(rest | {"eval/a/finished_task_count": 2.0}) is None
    failed = np.array([[True, False]])
    lengths = np.ones((1, 2)), np.ones((1, 2))
    parts = [_Measured({"score": np.array([[0.0, 1.0]])}, failed, [["", ""]], *lengths)]
    parts += [_Measured({"score": np.array([[-1.0, NAN]])}, ~failed, [["", ""]], *lengths)]
    for sources, first in (("aa", -1.0), ("ab", 0.0)):  # what another data source gives is no measure
        found = _Measured.join(parts, sources, RewardModelConfig()).scores["score"]
        np.testing.assert_array_equal(found, [[first, 1.0], [-1.0, NAN]])


def test_a_row_without_a_verdict_changes_no_number_of_the_others(tmp_path):
    """The batch is that of the other responses, with each estimator's inputs free of NaN."""
    config = small_config(tmp_path, **{"rollout.n": 4, "trainer.val_before_train": False})
    with open_run(config, initial_step=0) as run:
        state = first_state(run)
        weights = run.learner.networks.decode_weights(state.models.actor.params)
        groups = sample_batch(run, weights, state.stream, state.progress, 1)[0].experience
        assert groups is not None
        scores = {name: values.copy() for name, values in groups.scores.items()}
        for values in scores.values():
            values[0, 1] = NAN
        missing = dataclasses.replace(groups, scores=scores, by_policy=groups.mask)
        batch, metrics = make_batch(run.learner, missing, state.models, recompute=False, kl_coef=0.0)
        rewards = np.delete(groups.scores["seq_reward"][0], 1)
        expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
        np.testing.assert_allclose(batch.advantages[[0, 2, 3], 0], expected, rtol=1e-5, atol=1e-5)
        assert not any(array[1].any() for array in (batch.mask, batch.by_policy, batch.loss_mask, batch.advantages))
        assert batch.group_ids[1] == run.learner.batching.num_groups and np.isfinite(list(metrics.values())).all()
        assert sequence_lengths(batch)[1] == 0


@pytest.mark.slow
def test_the_divergence_of_carried_groups_is_weighed_by_the_coefficient_of_today(tmp_path):
    """Before, their reward was what an earlier step's coefficient had made of it, and their advantages were not."""
    changes = {"data.gen_batch_size": 24, "algorithm.filter_groups.rule": "mean_range", "rollout.n": 2, **CARRIED}
    changes |= {"algorithm.filter_groups.filter_low": -9.0, "algorithm.filter_groups.filter_high": 9.0}
    config = small_config(tmp_path, **KL | changes | {"algorithm.filter_groups.metric": "acc"})
    with open_run(config, initial_step=0) as run:
        state = first_state(run)
        moved = jax.tree.map(lambda x: 1.2 * x, state.models.actor.params)  # away from the reference
        weights, stream = run.learner.networks.decode_weights(moved), state.stream
        for step, kl_coef in ((1, 0.2), (2, 0.5)):
            progress = dataclasses.replace(state.progress, kl_coef=kl_coef)
            sampled, stream = sample_batch(run, weights, stream, progress, step)
            groups = sampled.experience
            divergence = groups.divergence(ROUNDING, run.learner.batching.rounding)
            assert np.abs(divergence).max() > 0.01
            expected = groups.scores["seq_reward"] - kl_coef * divergence
            np.testing.assert_allclose(groups.final_rewards, expected, atol=1e-6)
        assert sampled.metrics["dynamic_sampling/num_carried_in"] > 0


def with_divergence(acc, divergence, lengths):
    groups = experience(np.arange(len(acc)), acc, lengths=lengths)
    groups = groups.with_scores(seq_reward=groups.scores["score"])
    return dataclasses.replace(
        groups, kl=np.array(divergence)[..., None] * groups.mask / groups.mask.sum(-1)[..., None]
    )


def test_divergences_that_differ_by_rounding_do_not_differ():
    """Spreads in nats, of groups whose longest response has 10 tokens: up to 1e-4 is rounding in float32."""
    acc = [[0, 0], [0, 0], [0, 1], [0, 0], [1, 1]]
    divergence = [[0, 0.9e-4], [0, 1.1e-4], [0, 1e-7], [5.0, 5.00005], [-1e-4, 0.9e-4]]
    groups = with_divergence(acc, divergence, [[4, 10]] * 5)
    assert groups.differs_by_rounding(ROUNDING).tolist() == [True, False, False, True, False]
    counted = [[0, 0], [0, 1.1e-4], [0, 0], [5.0, 5.0], [-1e-4, 0]]  # of four tokens, up to 4e-5
    np.testing.assert_allclose(groups.divergence(ROUNDING, ROUNDING), counted, rtol=1e-6, err_msg="0 alone equals 0")
    different = with_divergence([[0, 1], [0, 0]], [[0.04, 0.02]] * 2, 10)  # in bfloat16, 0.1 is rounding
    np.testing.assert_allclose(different.divergence(ROUNDING, ROUNDING_BF16), [[0.04, 0.02], [0.02, 0.02]], rtol=1e-6)
    one = with_divergence([[0], [1]], [[0.0], [1.0]], 10)
    assert not one.differs_by_rounding(ROUNDING).any(), "a group of one has nothing to differ from"


@pytest.mark.full
def test_the_policy_and_an_equal_reference_keep_the_groups_whose_score_differs(tmp_path):
    """Before, every group passed the filter in step 1: two passes differ in the last digits."""
    schedules = {
        "score": {"algorithm.filter_groups.metric": "score"},
        "rounds": {},
        "small rounds": {"data.gen_batch_size": 5},
        "mesh": {"mesh.fsdp": 2, "mesh.data": 4, "actor.ppo_micro_batch_size_per_device": 1},
    }
    names = ("dynamic_sampling/trained_tokens", "critic/score/mean", "data/prompts_consumed")
    found = {}
    for name, changes in schedules.items():
        train(small_config(tmp_path / name, **KL | changes))
        row = read_metrics(tmp_path / name)[-1]
        found[name] = [row[metric] for metric in names], row["actor/grad_norm"]
    for name in schedules:
        assert found[name][0] == found["score"][0], name
        assert found[name][1] == pytest.approx(found["rounds"][1], rel=1e-3), name


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm.filter_groups.enable": False},
        {"trainer.rollout_ahead": 1},
        pytest.param({**CARRIED, "rollout.segment_length": 2}, marks=pytest.mark.full),
        pytest.param({"algorithm.adv_estimator": "remax"}, marks=pytest.mark.full),
    ],
    ids=["no filter", "ahead", "carried segments", "remax"],
)
def test_a_run_in_which_verdicts_are_missing_or_fail_resumes_as_if_not_stopped(tmp_path, changes):
    common = {"reward.function": unsure_function(tmp_path), "rollout.n": 6, "trainer.save_freq": 1, **changes}
    whole = train(small_config(tmp_path / "whole", **common, **{"trainer.total_training_steps": 3}))
    parts = copied(tmp_path / "whole", tmp_path / "parts", step=2)
    resumed = train(small_config(parts, **common, **{"trainer.total_training_steps": 3}))
    assert_same_policy(resumed, jax.device_get(whole.actor.params))
    rows = rows_without_clock(tmp_path / "whole")
    assert rows_without_clock(parts)[-1] == rows[-1]
    assert rows[-1]["reward/num_errors"] > rows[-1]["reward/num_missing"] > 0 and rows[-1]["rollout/acc/min"] >= -1
    assert ("train/mean_metric_std" in rows[-1]) == changes.get("algorithm.filter_groups.enable", True)
    assert None not in rows[-1].values()
