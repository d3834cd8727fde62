"""Host: what a run says of its learning rate at the start."""

import logging

import pytest
from small_run import small_config

from dapo_jax.learner.trained_networks import trained
from dapo_jax.run.settings import learning_rate_plan, learning_rates, warn_of_warm_up

WARM = {"actor.optim.lr": 1e-6, "actor.optim.lr_warmup_steps": 20, "trainer.total_training_steps": 100}
COSINE = {"actor.optim.lr_scheduler_type": "cosine", "actor.optim.min_lr_ratio": 0.1}
STAYS = "learning rate: rises from 5e-8 in step 1 to 1e-6 in step 20 (warm-up), then stays constant"

LEARNS = "falls to 3.76e-10 in step 100 (cosine)"  # (1 + cos(80 pi / 81)) / 2; it would be 0 in step 101


@pytest.mark.parametrize(
    ("changes", "done", "plan"),
    [
        (WARM, 0, STAYS),
        (WARM, 5, STAYS.replace("5e-8 in step 1 ", "3e-7 in step 6 ")),
        (WARM, 20, ""),
        (WARM | {"actor.optim.lr_warmup_steps": 0}, 0, ""),
        (WARM | COSINE, 0, STAYS.replace("stays constant", "falls to 1e-7 in step 100 (cosine)")),
        (WARM | COSINE, 99, ""),
        (WARM | COSINE | {"actor.optim.min_lr_ratio": 0.0}, 0, STAYS.replace("stays constant", LEARNS)),
        (
            WARM | COSINE | {"actor.optim.lr_warmup_steps": 0},
            0,
            "learning rate: falls from 1e-6 in step 1 to 1e-7 in step 100 (cosine)",
        ),
        (
            WARM | {"trainer.total_training_steps": 10},
            0,
            "learning rate: rises from 5e-8 in step 1 to 5e-7 in step 10 (warm-up)",
        ),
    ],
)
def test_the_plan_names_the_rates_of_the_run(changes, done, plan):
    config = small_config("unused", **changes)
    assert learning_rate_plan(config.actor.optim, config.trainer, done=done) == plan


def test_the_first_rate_of_the_plan_is_the_one_of_the_first_update():
    config = small_config(
        "unused", **WARM, **{"algorithm.adv_estimator": "gae", "trainer.critic_warmup": 10, "rollout.n": 4}
    )
    networks = trained(config)
    assert [*learning_rates(networks, config.trainer, 10)] == ["critic"]
    assert learning_rates(networks, config.trainer, 11)["actor"] == pytest.approx(5e-8)
    plan = learning_rate_plan(config.actor.optim, config.trainer, done=0)
    assert plan.startswith("learning rate: rises from 5e-8 in step 11 to 1e-6 in step 30")


@pytest.mark.parametrize(("steps", "warned"), [(19, True), (20, False), (100, False)])
def test_a_warm_up_longer_than_the_run_is_warned_of(caplog, steps, warned):
    with caplog.at_level(logging.WARNING):
        config = small_config("unused", **WARM | {"trainer.total_training_steps": steps})
        warn_of_warm_up(config.actor.optim, config.trainer)
    assert bool(caplog.messages) is warned
    assert all("lr_warmup_steps=20 is more than the 19 steps" in message for message in caplog.messages)
