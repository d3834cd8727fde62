"""What is reported as suspicious, and what is not."""

import json
import logging
import math

import pytest

from dapo_jax.config.sections import AlarmConfig
from dapo_jax.monitor.alarms import raise_alarms, raise_evaluation_alarms

CALM = {
    "actor/entropy": 1.0,
    "actor/ppo_kl": 0.001,
    "rollout_corr/k3_kl": 1e-7,
    "dynamic_sampling/uniform_share": 0.5,
    "response_length/clip_ratio": 0.1,
    "reward/error_share": 0.0,
    "reward/workers_replaced": 0,
}


def alarms_of(*steps):
    """The names of the alarms of the last of these steps."""
    memory, found = {}, {}
    for number, step in enumerate(steps, start=1):
        found, memory = raise_alarms({**CALM, **step}, memory, AlarmConfig(), number)
        memory = json.loads(json.dumps(memory))  # as a checkpoint keeps it
    return {name.removeprefix("alarm/") for name, on in found.items() if on}


@pytest.mark.parametrize(
    ("name", "value", "alarms"),
    [
        ("actor/entropy", 0.09, {"entropy_collapse"}),
        ("actor/entropy", 3.1, {"entropy_explosion"}),
        ("actor/ppo_kl", -0.02, {"kl_jump"}),
        ("actor/kl_loss", 0.5, set()),  # the first value of its kind
        ("rollout_corr/k3_kl", 2e-5, {"mismatch_growth"}),
        ("dynamic_sampling/uniform_share", 1.0, {"all_uniform"}),
        ("response_length/clip_ratio", 0.6, {"truncation"}),
        ("reward/error_share", 0.2, {"reward_errors"}),
        ("reward/workers_replaced", 1, {"reward_workers"}),
        ("reward/length_correlation", -0.9, {"score_by_length"}),
        ("reward/length_correlation", 0.9, {"score_by_length"}),
        ("reward/length_correlation", -0.7, set()),
        ("actor/entropy", math.nan, {"entropy_collapse", "entropy_explosion"}),
        ("rollout_corr/k3_kl", math.inf, {"mismatch_growth"}),
        ("actor/ppo_kl", math.nan, {"kl_jump"}),
        ("actor/ppo_kl", 0.0099, set()),
    ],
)
def test_each_alarm_has_its_metric(name, value, alarms):
    assert alarms_of({}, {}, {}) == set()
    assert alarms_of({}, {name: value}) == alarms
    assert alarms_of({}, {name: value}, {}) == set()


def test_a_divergence_that_stays_high_becomes_the_normal_one():
    high = {"actor/ppo_kl": 0.1}
    assert alarms_of({}, high, high) == {"kl_jump"}
    assert alarms_of({}, *[high] * 40) == set()


def test_an_alarm_is_logged_when_it_begins(caplog):
    memory = {}
    with caplog.at_level(logging.WARNING):
        for step, ratio in enumerate([0.1, 0.9, 0.9, 0.1, 0.9], start=1):
            _, memory = raise_alarms({"response_length/clip_ratio": ratio}, memory, AlarmConfig(), step)
    assert [record.message.split(":")[0] for record in caplog.records] == ["alarm at step 2", "alarm at step 5"]


def test_without_metrics_there_is_no_alarm():
    assert set(raise_alarms({}, {}, AlarmConfig(), 1)[0].values()) == {0.0}


# A score of -1 and 1 is its own accuracy.
@pytest.mark.parametrize(
    ("accuracies", "raised"),
    [
        ((0.1, 0.4, 0.21, 0.19, 0.3, 0.5, 0.24), [0, 0, 0, 1, 0, 0, 1]),
        ((0.1, 0.5, math.nan), [0, 0, 1]),
        ((-0.9, -0.6, -0.4, 0.1), [0, 0, 0, 0]),
        ((0.1, 0.4, None, 0.19), [0, 0, None, 1]),
    ],
)
def test_held_out_accuracy_far_below_the_best_one_is_an_alarm(accuracies, raised):
    memory, found = {}, []
    for step, accuracy in enumerate(accuracies):
        alarms, memory = raise_evaluation_alarms(accuracy, memory, AlarmConfig(), step)
        _, memory = raise_alarms(CALM, json.loads(json.dumps(memory)), AlarmConfig(), step)  # of the step after it
        found.append(alarms.get("alarm/heldout_drop"))
    assert found == raised
