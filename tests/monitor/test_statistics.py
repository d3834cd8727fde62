import numpy as np
import pytest

from dapo_jax.monitor.statistics import accuracy_at, advantage_metrics, length_metrics, score_metrics

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


def test_advantages_are_counted_on_response_tokens_only():
    metrics = advantage_metrics(np.array([[1.0, 9.0], [-3.0, 2.0]]), np.array([[True, False], [True, True]]))
    assert metrics == {
        "critic/advantages/mean": 0.0, "critic/advantages/max": 2.0, "critic/advantages/min": -3.0
    }  # fmt: skip


def test_samples_and_groups_without_a_score_do_not_count():
    scores = {"format": np.array([[1.0, np.nan], [np.nan, np.nan], [0.0, 1.0]]), "none": np.full((3, 2), np.nan)}
    rollout, evaluation = score_metrics(scores), accuracy_at("dummy", scores)
    assert rollout == {"rollout/format/mean": 0.75, "rollout/format/max": 1.0, "rollout/format/min": 0.5}
    assert evaluation == {"eval/dummy/format/mean@2": 0.75, "eval/dummy/format/std@2": 0.25}
