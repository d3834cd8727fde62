"""Host: a config with verl's defaults for every option that changes the result, the base for `from_verl`.

    python -m dapo_jax.train --config dapo_jax/tools/from_verl/defaults.py --config.model.path=DIRECTORY ...

So options that a verl script does not set behave as in verl. Options that only change speed, memory, records,
checkpoints or evaluation keep the defaults of dapo_jax.
"""

from typing import Any

from dapo_jax.config.values import default_config


def get_config() -> Any:
    config = default_config()
    config.data.train_batch_size = 1024
    config.data.max_prompt_length = 512
    config.data.max_response_length = 512
    config.model.router_replay = False
    config.rollout.n = 1
    config.algorithm.adv_estimator = "gae"
    config.algorithm.filter_groups.enable = False
    config.actor.ppo_mini_batch_size = 256
    config.actor.clip_ratio_high = 0.2
    config.actor.clip_ratio_c = 3.0
    config.actor.optim.lr_warmup_steps = 0
    config.actor.optim.weight_decay = 0.01
    config.trainer.total_training_steps = -1
    config.trainer.total_epochs = 30
    return config
