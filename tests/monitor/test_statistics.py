import numpy as np
import pytest

from dapo_jax.monitor.statistics import accuracy_at, length_metrics, score_metrics

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
