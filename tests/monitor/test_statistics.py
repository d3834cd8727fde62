import numpy as np
import pytest

from dapo_jax.monitor.statistics import (
    accuracy_at,
    advantage_metrics,
    explained_variance,
    length_metrics,
    score_metrics,
)

TASKS = {"accuracy": np.array([[0.8, 0.9], [0.6, 0.9], [0.95, 0.85]])}


def test_rollout_metrics_are_over_the_means_of_tasks():
    metrics = score_metrics(TASKS)
    assert metrics["rollout/accuracy/mean"] == pytest.approx(0.8333, abs=1e-4)
    assert metrics["rollout/accuracy/max"] == pytest.approx(0.9)
    assert metrics["rollout/accuracy/min"] == pytest.approx(0.75)


def test_evaluation_means_and_population_deviations():
    metrics = accuracy_at("dummy", TASKS)
    assert metrics["eval/dummy/accuracy/mean@2"] == pytest.approx(0.8333, abs=1e-4)
    assert metrics["eval/dummy/accuracy/std@2"] == pytest.approx(0.0833, abs=1e-4)


def test_the_clip_ratio_is_against_the_configured_limit():
    metrics = length_metrics("response", np.array([3, 5, 10]), 10)
    assert metrics["response_length/clip_ratio"] == pytest.approx(1 / 3)
    assert length_metrics("response", np.array([3, 5]), 10)["response_length/clip_ratio"] == 0


def test_advantages_of_no_token_are_zero():
    names = [f"critic/returns/{name}" for name in ("mean", "max", "min")]
    assert advantage_metrics("returns", np.array([1.0, -3.0])) == dict(zip(names, (-1.0, 1.0, -3.0), strict=True))
    assert advantage_metrics("returns", np.array([])) == dict.fromkeys(names, 0.0)


def test_a_perfect_critic_explains_all_and_a_constant_one_nothing():
    returns = np.array([1.0, 2.0, 4.0])
    assert explained_variance(returns, returns) == 1
    assert explained_variance(np.full(3, 3.0), returns) == pytest.approx(0, abs=1e-5)
    assert explained_variance(returns[:1], returns[:1]) == 0


def test_samples_and_groups_without_a_score_do_not_count():
    scores = {"format": np.array([[1.0, np.nan], [np.nan, np.nan], [0.0, 1.0]]), "none": np.full((3, 2), np.nan)}
    rollout, evaluation = score_metrics(scores), accuracy_at("dummy", scores)
    assert rollout == {"rollout/format/mean": 0.75, "rollout/format/max": 1.0, "rollout/format/min": 0.5}
    assert evaluation == {"eval/dummy/format/mean@2": 0.75, "eval/dummy/format/std@2": 0.25}
