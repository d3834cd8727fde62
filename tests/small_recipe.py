"""The recipe of the tests' runs: a random two-layer model, sums of one-digit numbers."""

from typing import Any

from dapo_jax.config import default_config


def get_config() -> Any:
    config = default_config()
    config.workdir = "runs/tiny"
    config.model.path = "random"
    config.model.random.initializer_range = 0.1
    config.model.enable_gradient_checkpointing = False
    config.data.task = "arithmetic"
    config.data.arithmetic.high = 9
    config.data.arithmetic.num_heldout = 16
    config.data.train_batch_size = 16
    config.data.max_prompt_length = 16
    config.data.max_response_length = 4
    config.rollout.n = 16
    config.actor.ppo_mini_batch_size = 16
    config.actor.ppo_micro_batch_size_per_device = 32
    config.actor.optim.lr = 3e-3
    config.actor.optim.lr_warmup_steps = 0
    config.actor.optim.weight_decay = 0.0
    config.trainer.total_training_steps = 40
    config.trainer.test_freq = 10
    config.trainer.save_freq = 20
    return config
