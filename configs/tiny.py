"""A random two-layer model learns which of two digits is larger: a first look at every part of a run.

    python -m dapo_jax.train --config configs/tiny.py

Hardware: anything; two CPU cores take about half a minute, most of it compiling. Expect: accuracy on 32 held-out
problems from 0.04 to 0.73, with single seeds from 0.71 to 0.75. The policy first finds digits, then ends its answers
after one (the soft overlong punishment), then learns which digit is larger.
"""

from typing import Any

from dapo_jax.config import default_config


def get_config() -> Any:
    config = default_config()
    config.workdir = "runs/tiny"
    config.model.path = "random"
    config.model.random.initializer_range = 0.1
    config.model.enable_gradient_checkpointing = False
    config.data.task = "arithmetic"
    config.data.arithmetic.operators = ">"
    config.data.arithmetic.high = 9
    config.data.arithmetic.num_heldout = 32
    config.data.arithmetic.template = "larger: {a} or {b}?"
    config.data.train_batch_size = 8
    config.data.gen_batch_size = 32
    config.data.max_prompt_length = 16
    config.data.max_response_length = 3
    config.rollout.n = 16
    config.rollout.max_num_seqs = 512
    config.reward.overlong_buffer.enable = True
    config.reward.overlong_buffer.len = 1
    config.reward.overlong_buffer.penalty_factor = 0.2
    config.algorithm.filter_groups.on_limit = "partial"  # a policy that is nearly always right has few mixed groups
    config.actor.ppo_mini_batch_size = 8
    config.actor.ppo_micro_batch_size_per_device = 16  # eight devices divide a batch of 128 rows so
    config.actor.use_dynamic_bsz = False
    config.actor.entropy_coeff = 0.05
    config.actor.optim.lr = 3e-3
    config.actor.optim.lr_warmup_steps = 0
    config.actor.optim.weight_decay = 0.0
    config.evaluate.n = 16
    config.trainer.total_training_steps = 100
    config.trainer.test_freq = 10
    config.trainer.save_freq = 20
    config.monitor.alarms.entropy_collapse = 0.0  # a known digit leaves nothing uncertain
    return config
