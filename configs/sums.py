"""SmolLM2-135M-Instruct learns to add up two and three numbers step by step, with all of DAPO, on a laptop's CPU.

    dapo-jax data sums
    python -m dapo_jax.train --config configs/sums.py

Hardware: two CPU cores and 12 GiB of memory. Expect: docs/results/dapo.md, which compares DAPO's parts in this setting.
At first, some groups are all wrong and others mixed, and half of the answers hit the limit of 32 tokens.
"""

from typing import Any

from dapo_jax.config import default_config
from dapo_jax.hub.smollm2 import SMOLLM2


def get_config() -> Any:
    config = default_config()
    config.workdir = "runs/sums"
    config.model.path = SMOLLM2
    config.model.enable_gradient_checkpointing = False
    config.data.train_files = ("data/sums/train.parquet",)
    config.data.val_files = ("data/sums/heldout.parquet",)
    config.data.system_prompt = ""
    config.data.train_batch_size = 6
    config.data.gen_batch_size = 12
    config.data.max_prompt_length = 66
    config.data.max_response_length = 32
    config.rollout.n = 8
    config.rollout.max_num_seqs = 128
    config.rollout.decode_chunk_length = 8
    config.reward.overlong_buffer.enable = True
    config.reward.overlong_buffer.len = 8
    config.algorithm.overlong_filtering = True
    config.actor.ppo_mini_batch_size = 2
    config.actor.ppo_micro_batch_size_per_device = 16
    config.actor.optim.lr = 1.2e-5
    config.actor.optim.lr_scheduler_type = "cosine"
    config.actor.optim.min_lr_ratio = 0.1
    config.actor.optim.lr_warmup_steps = 2
    config.actor.optim.weight_decay = 0.0
    config.trainer.total_training_steps = 16
    config.trainer.test_freq = 4
    config.trainer.save_freq = 16
    config.evaluate.n = 2
    return config
