import numpy as np
import pytest

from dapo_jax.monitor.statistics import (
    advantage_metrics,
    balance_metrics,
    evaluation_metrics,
    explained_variance,
    group_reward_metrics,
    length_correlation,
    length_metrics,
    score_metrics,
    time_metrics,
)

TASKS = {"accuracy": np.array([[0.8, 0.9], [0.6, 0.9], [0.95, 0.85]])}


def named(prefix, values):
    return {f"{prefix}/{name}": value for name, value in values.items()}


def test_rollout_metrics_are_over_the_means_of_tasks():
    expected = {"mean": 2.5 / 3, "max": 0.9, "min": 0.75}
    assert score_metrics(TASKS) == pytest.approx(named("rollout/accuracy", expected))


def test_evaluation_means_and_population_deviations():
    expected = {"mean@2": 2.5 / 3, "std@2": 0.25 / 3, "best@2": 2.75 / 3, "worst@2": 2.25 / 3}
    assert evaluation_metrics("eval/dummy", TASKS) == pytest.approx(named("eval/dummy/accuracy", expected))


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("bootstrapped", {"best@2": 0.8762, "worst@2": 0.7889}),
        ("detailed", {"mean@2": 0.8333, "mean@2/mean": 0.8333, "mean@2/std": 0.0624}),
        ("detailed", {"mean@2/max": 0.9, "mean@2/min": 0.75}),
        ("detailed", {"std@2/mean": 0.0833, "std@2/std": 0.0471, "std@2/max": 0.15, "std@2/min": 0.05}),
    ],
)
def test_bootstrapped_and_detailed_statistics_are_over_tasks(option, expected):
    metrics = evaluation_metrics("bench/dummy", TASKS, **{option: True})
    expected = named("bench/dummy/accuracy", expected)
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=1e-4)


RANDOM = np.random.default_rng(0)
LENGTHS = RANDOM.integers(5, 100, (32, 8))
RIGHT = RANDOM.random((32, 8)) < 0.4


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


def test_samples_and_groups_without_a_score_do_not_count():
    scores = {"format": np.array([[1.0, np.nan], [np.nan, np.nan], [0.0, 1.0]]), "none": np.full((3, 2), np.nan)}
    assert score_metrics(scores) == named("rollout/format", {"mean": 0.75, "max": 1.0, "min": 0.5})
    expected = {"mean@2": 0.75, "std@2": 0.25, "best@2": 1.0, "worst@2": 0.5}
    assert evaluation_metrics("eval/dummy", scores) == named("eval/dummy/format", expected)


def test_the_clip_ratio_is_against_the_configured_limit():
    for lengths, ratio in (([3, 5, 10], 1 / 3), ([3, 5], 0)):
        assert length_metrics("response", np.array(lengths), 10)["response_length/clip_ratio"] == pytest.approx(ratio)


def test_advantages_of_no_token_are_zero():
    for values, (mean, most, least) in (([1.0, -3.0], (-1.0, 1.0, -3.0)), ([], (0.0, 0.0, 0.0))):
        expected = named("critic/returns", {"mean": mean, "max": most, "min": least})
        assert advantage_metrics("returns", np.array(values)) == expected


def test_a_perfect_critic_explains_all_and_a_constant_one_nothing():
    returns = np.array([1.0, 2.0, 4.0])
    assert explained_variance(returns, returns) == 1
    assert explained_variance(np.full(3, 3.0), returns) == pytest.approx(0, abs=1e-5)
    assert explained_variance(returns[:1], returns[:1]) == 0


def test_group_rewards_are_means_and_population_deviations_over_groups():
    metrics = group_reward_metrics(np.array([[0.8, 0.8], [0.7, 1.1]]))
    expected = {"reward_mean/mean": 0.85, "reward_mean/max": 0.9, "reward_std/max": 0.2, "reward_std/min": 0.0}
    expected = named("experience_pipeline/group_advantages", expected)
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


def test_balance_is_before_and_after_rows_are_divided():
    expected = {"min": 3, "max": 13, "minmax_diff": 10, "balanced_min": 7, "balanced_max": 9, "mean": 8}
    assert balance_metrics(np.array([1, 2, 3, 10]), np.array([7.0, 9.0])) == named("global_seqlen", expected)


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
    assert time_metrics({"timing_s/testing": 1.0}) == {"time/eval": 1.0}, "the row before the first step"
    nothing = {"timing_s/gen": 1.0, "dynamic_sampling/generated_tokens": 0}
    assert time_metrics(nothing) == {"time/wait_explore_step": 1.0}


def test_a_problem_with_more_samples_changes_no_name():
    scores, votes = {"acc": np.array([[1, 0, np.nan, np.nan], [0, 0, 1, 1]])}, [["1", "2", None, None], list("3344")]
    found = evaluation_metrics("e", scores, votes, n=2)
    expected = {"mean@2": 0.5, "std@2": 0.5, "best@2": (1 + 5 / 6) / 2, "worst@2": 1 / 12, "maj@2": 0.5}
    expected |= {"pass@1": 0.5, "pass@2": (1 + 5 / 6) / 2}
    assert found == pytest.approx(named("e/acc", expected))
