"""PPO (arXiv:1707.06347) with generalised advantage estimation and a critic, on the quickstart's task.

    python scripts/data/download_smollm2.py
    python -m dapo_jax.train --config configs/ppo_critic.py

Hardware: two CPU cores and 12 GiB of memory; about 10 minutes, extrapolated. Only two steps were run: no accuracy is
claimed. configs/quickstart.py is DAPO on the same task.

The critic starts as the policy's transformer with a zero head, and the first step updates only the critic. gamma =
lambda = 1 and its clip range of 0.5 are the defaults. Its learning rate is five times verl's 1e-5, because it takes
only 56 optimizer steps. The four samples of a prompt share its prefill; no advantage compares them.
"""

import os
from pathlib import Path
from typing import Any

from dapo_jax.config import default_config

CACHE = Path(os.environ.get("DAPO_JAX_CACHE", "~/.cache/dapo_jax")).expanduser()


def get_config() -> Any:
    config = default_config()
    config.workdir = "runs/ppo_critic"
    config.model.path = str(CACHE / "SmolLM2-135M-Instruct.Q4_1.gguf")
    config.model.enable_gradient_checkpointing = False
    config.data.task = "arithmetic"
    config.data.arithmetic.template = "Calculate {a} {operator} {b}. Answer with the number only."
    config.data.system_prompt = ""
    config.data.train_batch_size = 16
    config.data.max_prompt_length = 64
    config.data.max_response_length = 12
    config.rollout.n = 4
    config.rollout.max_num_seqs = 256
    config.rollout.decode_chunk_length = 11
    config.algorithm.adv_estimator = "gae"
    config.algorithm.filter_groups.enable = False
    config.actor.ppo_mini_batch_size = 8
    config.actor.ppo_micro_batch_size_per_device = 32
    config.actor.clip_ratio_high = 0.2
    config.actor.clip_ratio_c = 3.0
    config.actor.optim.lr = 1.2e-5
    config.actor.optim.lr_scheduler_type = "cosine"
    config.actor.optim.min_lr_ratio = 0.1
    config.actor.optim.lr_warmup_steps = 2
    config.actor.optim.weight_decay = 0.0
    config.critic.optim.lr = 5e-5
    config.trainer.critic_warmup = 1
    config.trainer.total_training_steps = 28
    config.trainer.test_freq = 4
    config.trainer.save_freq = 14
    return config
