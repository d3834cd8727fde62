"""GRPO (arXiv:2402.03300) on the quickstart's task: no group filter, symmetric clip, sequence means, KL loss.

    python -m dapo_jax.train --config configs/grpo.py

Hardware: two CPU cores and 8 GiB of memory; about 10 minutes, extrapolated. Only two steps were run: no accuracy is
claimed. configs/quickstart.py is DAPO on the same task, with the same adapters.

A group whose answers are all right or all wrong stays in the batch with advantage 0. About half of the groups are like
that, so each step trains on 16 groups. clip_ratio_c 3 and the KL loss's coefficient and estimator are verl's. By
default verl averages over tokens; the paper and this recipe average over sequences first.
"""

from typing import Any

from quickstart import get_config as quickstart

from dapo_jax.config import default_config


def get_config() -> Any:
    config = quickstart()
    config.workdir = "runs/grpo"
    config.data.train_batch_size = 16
    config.data.gen_batch_size = None
    config.reward.overlong_buffer = default_config().reward.overlong_buffer
    config.algorithm.filter_groups.enable = False
    config.algorithm.filter_groups.leftover = "requeue"
    config.actor.ppo_mini_batch_size = 8
    config.actor.clip_ratio_high = 0.2
    config.actor.clip_ratio_c = 3.0
    config.actor.loss_agg_mode = "seq-mean-token-mean"
    config.actor.use_kl_loss = True
    config.trainer.total_training_steps = 28
    return config
