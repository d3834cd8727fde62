"""GRPO (arXiv:2402.03300) on the quickstart's task: no group filter, symmetric clip, sequence means, KL loss.

    python scripts/data/download_smollm2.py
    python -m dapo_jax.train --config configs/grpo.py

Hardware: two CPU cores and 12 GiB of memory; about 12 minutes, extrapolated. Only two steps were run: no accuracy is
claimed. configs/quickstart.py is DAPO on the same task.

A group whose answers are all right or all wrong stays in the batch with advantage 0. About half of the groups are like
that, so each step trains on 16 groups, twice as many as the quickstart. clip_ratio_c 3 and the KL loss's coefficient
and estimator are verl's. By default verl averages over tokens; the paper and this recipe average over sequences
first.
"""

import os
from pathlib import Path
from typing import Any

from dapo_jax.config import default_config

CACHE = Path(os.environ.get("DAPO_JAX_CACHE", "~/.cache/dapo_jax")).expanduser()


def get_config() -> Any:
    config = default_config()
    config.workdir = "runs/grpo"
    config.model.path = str(CACHE / "SmolLM2-135M-Instruct.Q4_1.gguf")
    config.model.enable_gradient_checkpointing = False
    config.data.task = "arithmetic"
    config.data.arithmetic.template = "Calculate {a} {operator} {b}. Answer with the number only."
    config.data.system_prompt = ""
    config.data.train_batch_size = 16
    config.data.max_prompt_length = 64
    config.data.max_response_length = 12
    config.rollout.n = 8
    config.rollout.max_num_seqs = 256
    config.rollout.decode_chunk_length = 11
    config.algorithm.filter_groups.enable = False
    config.actor.ppo_mini_batch_size = 8
    config.actor.ppo_micro_batch_size_per_device = 32
    config.actor.clip_ratio_high = 0.2
    config.actor.clip_ratio_c = 3.0
    config.actor.loss_agg_mode = "seq-mean-token-mean"
    config.actor.use_kl_loss = True
    config.actor.optim.lr = 1.2e-5
    config.actor.optim.lr_scheduler_type = "cosine"
    config.actor.optim.min_lr_ratio = 0.1
    config.actor.optim.lr_warmup_steps = 2
    config.actor.optim.weight_decay = 0.0
    config.trainer.total_training_steps = 28
    config.trainer.test_freq = 4
    config.trainer.save_freq = 14
    return config
