import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest

from dapo_jax.monitor.statistics import (
    advantage_metrics,
    balance_metrics,
    evaluation_metrics,
    expected_best,
    explained_variance,
    group_reward_metrics,
    length_correlation,
    length_metrics,
    pass_at,
    problem_statistics,
    score_metrics,
    subset_sizes,
    time_metrics,
    vote,
)

GOLDEN = json.loads((Path(__file__).parent / "data" / "validation_metrics.json").read_text())
VALUES = np.array([0.3, 1.0, -0.5, 0.3, 0.7])
RANDOM = np.random.default_rng(0)
LENGTHS = RANDOM.integers(5, 100, (32, 8))
RIGHT = RANDOM.random((32, 8)) < 0.4


def named(prefix, values):
    return {f"{prefix}/{name}": value for name, value in values.items()}


@pytest.mark.parametrize("case", GOLDEN, ids=[case["name"] for case in GOLDEN])
def test_the_bootstrap_is_verls(case):
    columns, found = {name: np.array(values) for name, values in case["inputs"].items()}, {}
    for source in set(columns["data_sources"]):
        rows = columns["data_sources"] == source
        problems = len(set(columns["uids"][rows]))
        acc, reward, pred = (columns[name][rows].reshape(problems, -1) for name in ("acc", "reward", "pred"))
        found |= evaluation_metrics(source, {"acc": acc, "reward": reward}, pred.tolist(), bootstrapped=True)
    ours = {name: re.sub("/std$", "/bootstrap_std", name.removesuffix("/mean")) for name in case["expected"]}
    assert {name: found.pop(our) for name, our in ours.items()} == pytest.approx(case["expected"], rel=1e-12)
    assert all(re.search("pass@|std@1$", name) for name in found), "what verl does not report"


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_the_expected_best_is_the_mean_over_all_subsets(k):
    best = [max(chosen) for chosen in itertools.combinations(VALUES, k)]
    worst = [min(chosen) for chosen in itertools.combinations(VALUES, k)]
    found = problem_statistics(VALUES, None, [k])
    assert found == {f"best@{k}": pytest.approx(np.mean(best)), f"worst@{k}": pytest.approx(np.mean(worst))}


@pytest.mark.parametrize(("n", "right", "k"), [(4, 1, 2), (5, 0, 3), (5, 5, 1), (8, 3, 4), (6, 2, 6)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(n, right, k):
    samples = np.array([1.0] * right + [0.0] * (n - right))
    share = np.mean([any(chosen) for chosen in itertools.combinations(samples, k)])
    assert pass_at(n, right, k) == pytest.approx(share)


def test_k_may_be_large_and_larger_than_the_number_of_samples():
    assert expected_best(VALUES[:2], 4) == 1.0 and pass_at(2, 1, 4) == 1.0
    assert pass_at(200, 1, 100) == pytest.approx(0.5)
    assert [subset_sizes(n) for n in (1, 2, 3, 4, 6, 8)] == [[], [2], [2, 3], [2, 4], [2, 4, 6], [2, 4, 8]]


@pytest.mark.parametrize(
    ("answers", "chosen", "value"),
    [
        (["a", "b", "b", "a"], range(4), 0.0),
        (["a", "b", "b", "c"], range(4), 1.0),
        ([None, "b", None, "c"], range(4), 0.0),  # no answer is an answer
        (["a", "b", "b", "a"], [3, 1, 2], 1.0),
    ],
)
def test_the_vote_is_the_most_frequent_answer_and_the_first_of_several(answers, chosen, value):
    assert vote(np.array([0.0, 1.0, 0.5, 0.25]), answers, chosen) == value


def test_detailed_statistics_are_over_tasks():
    tasks = {"accuracy": np.array([[0.8, 0.9], [0.6, 0.9], [0.95, 0.85]])}
    metrics = evaluation_metrics("bench/dummy", tasks, detailed=True)
    expected = {"mean@2": 0.8333, "mean@2/mean": 0.8333, "mean@2/std": 0.0624, "mean@2/max": 0.9, "mean@2/min": 0.75}
    expected |= {"std@2/mean": 0.0833, "std@2/std": 0.0471, "std@2/max": 0.15, "std@2/min": 0.05}
    expected = named("bench/dummy/accuracy", expected)
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("verdict", ["said", "the score itself", "none"])
@pytest.mark.parametrize(
    ("penalty", "sign"), [(0.005 * LENGTHS, -1), (0.5 * (LENGTHS / 100) ** 2, -1), (0.3 * np.cos(LENGTHS / 32), 1)]
)
def test_a_score_that_pays_for_length_is_seen(verdict, penalty, sign):
    scores = np.where(RIGHT, 1.0, -1.0 if verdict != "none" else 1.0) - penalty
    right = {"said": RIGHT, "the score itself": scores > 0, "none": np.zeros_like(RIGHT)}[verdict]
    assert 0.8 < sign * length_correlation(scores, LENGTHS, right, np.ones_like(RIGHT)) <= 1


def test_an_honest_score_is_not_taken_for_one_that_pays_for_length():
    known, longer = np.ones_like(RIGHT), np.where(RIGHT, LENGTHS, 100)  # what is wrong is cut off
    honest = {
        "right or wrong": np.where(RIGHT, 1.0, -1.0),
        "partial credit for a form that only short answers have": np.where(RIGHT, 1.0, np.where(LENGTHS < 50, 0.1, 0)),
        "a judge's mark": np.where(RIGHT, 1.0, 0.0) + RANDOM.normal(0, 0.1, RIGHT.shape),
    }
    for name, scores in honest.items():
        for lengths in (LENGTHS, longer):
            assert abs(length_correlation(scores, lengths, RIGHT, known)) < 0.5, name


def test_of_few_answers_and_failed_verifications_no_correlation_is_known():
    scores, known = -0.01 * LENGTHS, np.ones_like(RIGHT)
    assert length_correlation(scores[:2, :7], LENGTHS[:2, :7], RIGHT[:2, :7] & False, known[:2, :7]) == 0
    assert length_correlation(scores, LENGTHS, RIGHT, known & False) == 0
    assert length_correlation(scores, np.full_like(LENGTHS, 7), RIGHT, known) == 0
    noisy = np.where(RIGHT, RANDOM.normal(0, 100, RIGHT.shape), scores)
    assert length_correlation(noisy, LENGTHS, RIGHT & False, ~RIGHT) == pytest.approx(-1)


def test_accuracy_has_pass_at_k_and_answers_have_votes():
    scores = {"acc": np.array([[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 1.0, 0.0]])}
    answers = [["7", "8", "8", None], ["7", "9", "9", "7"]]
    metrics = evaluation_metrics("eval/dummy", scores, answers)
    expected = {
        "pass@1": 0.375,
        "mean@4": 0.375,
        "pass@2": (1 / 2 + 5 / 6) / 2,
        "pass@4": 1.0,
        "best@4": 1.0,
        "maj@4": 0,
    }
    expected = named("eval/dummy/acc", expected)
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert "eval/dummy/acc/maj@2" not in metrics
    assert not any("maj" in name for name in evaluation_metrics("e", scores, [[None] * 4] * 2))
    assert not any("pass" in name for name in evaluation_metrics("e", {"score": scores["acc"]}, answers))


def test_a_problem_with_more_samples_changes_no_name():
    scores, votes = {"acc": np.array([[1, 0, np.nan, np.nan], [0, 0, 1, 1]])}, [["1", "2", None, None], list("3344")]
    found = evaluation_metrics("e", scores, votes, n=2)
    expected = {"mean@2": 0.5, "std@2": 0.5, "best@2": (1 + 5 / 6) / 2, "worst@2": 1 / 12, "maj@2": 0.5}
    expected |= {"pass@1": 0.5, "pass@2": (1 + 5 / 6) / 2}
    assert found == pytest.approx(named("e/acc", expected))


def test_samples_and_groups_without_a_score_do_not_count():
    scores = {"format": np.array([[1.0, np.nan], [np.nan, np.nan], [0.0, 1.0]]), "none": np.full((3, 2), np.nan)}
    assert score_metrics(scores) == named("rollout/format", {"mean": 0.75, "max": 1.0, "min": 0.5})
    expected = {"mean@2": 0.75, "std@2": 0.25, "best@2": 1.0, "worst@2": 0.5}
    assert evaluation_metrics("eval/dummy", scores) == named("eval/dummy/format", expected)


def test_a_perfect_critic_explains_all_and_a_constant_one_nothing():
    returns = np.array([1.0, 2.0, 4.0])
    assert explained_variance(returns, returns) == 1
    assert explained_variance(np.full(3, 3.0), returns) == pytest.approx(0, abs=1e-5)
    assert explained_variance(returns[:1], returns[:1]) == 0


BALANCE = {"min": 3, "max": 13, "minmax_diff": 10, "balanced_min": 7, "balanced_max": 9, "mean": 8}
GROUP_REWARDS = {"reward_mean/mean": 0.85, "reward_mean/max": 0.9, "reward_std/max": 0.2, "reward_std/min": 0.0}


@pytest.mark.parametrize(
    ("metrics", "prefix", "expected"),
    [
        (length_metrics("response", np.array([3, 5, 10]), 10), "response_length", {"clip_ratio": 1 / 3, "max": 10}),
        (length_metrics("response", np.array([3, 5]), 10), "response_length", {"clip_ratio": 0, "mean": 4}),
        (advantage_metrics("a", np.array([1.0, -3.0])), "critic/a", {"mean": -1.0, "max": 1.0, "min": -3.0}),
        (advantage_metrics("a", np.array([])), "critic/a", {"mean": 0.0, "max": 0.0, "min": 0.0}),
        (
            group_reward_metrics(np.array([[0.8, 0.8], [0.7, 1.1]])),
            "experience_pipeline/group_advantages",
            GROUP_REWARDS,
        ),
        (balance_metrics(np.array([1, 2, 3, 10]), np.array([7.0, 9.0])), "global_seqlen", BALANCE),
    ],
)
def test_metrics_by_hand(metrics, prefix, expected):
    assert {name: metrics[f"{prefix}/{name}"] for name in expected} == pytest.approx(expected)


def test_times_are_per_token_and_under_both_names():
    seconds = {"gen": 2.0, "reward": 1.0, "adv": 0.5, "update_actor": 3.0, "testing": 4.0, "step": 9.0}
    seconds |= {"shape": 0.1, "filter": 0.2, "batch": 0.3, "write": 0.4}
    row = named("timing_s", seconds) | {"perf/total_num_tokens": 500, "dynamic_sampling/generated_tokens": 1000}
    operators = {"0_RewardShaping": 0.1, "1_GroupFilter": 0.2, "2_BatchAssembly": 0.3, "3_GroupAdvantage": 0.5}
    assert time_metrics(row) == {
        **named("timing_per_token_ms", {"gen": 2.0, "adv": 1.0, "update_actor": 6.0}),
        **named("time", {"eval": 4.0, "wait_explore_step": 3.0, "train_step": 3.5}),
        **named("time/experience_pipeline/operator", operators),
        **named("time/experience_pipeline", {"write": 0.4, "total": pytest.approx(1.5)}),
    }
    passes = row | {"timing_s/ref": 1.0}
    assert time_metrics(passes)["timing_per_token_ms/ref"] == 2.0
    of_all_sampled = time_metrics(passes | {"actor/reward_kl_penalty": 0.1})
    assert "timing_per_token_ms/ref" not in of_all_sampled and of_all_sampled["time/train_step"] == 4.5
    ahead = time_metrics(row, ahead=True)
    assert ahead["timing_per_token_ms/adv"] == 1.0 and ahead["time/wait_explore_step"] == 3.0
    assert not {"time/train_step", "timing_per_token_ms/gen", "timing_per_token_ms/update_actor"} & set(ahead)
    assert time_metrics({"timing_s/testing": 1.0}) == {"time/eval": 1.0}, "the row before the first step"
    nothing = {"timing_s/gen": 1.0, "dynamic_sampling/generated_tokens": 0}
    assert time_metrics(nothing) == {"time/wait_explore_step": 1.0}
