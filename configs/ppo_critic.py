"""PPO (arXiv:1707.06347) with generalised advantage estimation and a critic, on the quickstart's task.

    python -m dapo_jax.train --config configs/ppo_critic.py

Hardware: two CPU cores and 8 GiB of memory; about 10 minutes, extrapolated. Only two steps were run: no accuracy is
claimed. configs/quickstart.py is DAPO on the same task, with the same adapters.

The critic starts as the policy's transformer with a zero head and trains all of its weights; the first step updates
only the critic. gamma = lambda = 1 and its clip range of 0.5 are the defaults. Its learning rate is five times verl's
1e-5, because it takes only 56 optimizer steps. The four samples of a prompt share its prefill; no advantage compares
them.
"""

from typing import Any

from quickstart import get_config as quickstart

from dapo_jax.config import default_config


def get_config() -> Any:
    config = quickstart()
    config.workdir = "runs/ppo_critic"
    config.data.train_batch_size = 16
    config.data.gen_batch_size = None
    config.rollout.n = 4
    config.reward.overlong_buffer = default_config().reward.overlong_buffer
    config.algorithm.adv_estimator = "gae"
    config.algorithm.filter_groups.enable = False
    config.algorithm.filter_groups.leftover = "requeue"
    config.actor.ppo_mini_batch_size = 8
    config.actor.clip_ratio_high = 0.2
    config.actor.clip_ratio_c = 3.0
    config.critic.optim.lr = 5e-5
    config.trainer.total_training_steps = 28
    config.trainer.save_freq = 14
    config.trainer.critic_warmup = 1
    return config
