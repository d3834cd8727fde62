"""Clip-Cov on Qwen2.5-7B: some tokens of high covariance get no gradient (arXiv:2505.22617, equation 11).

    python -m dapo_jax.train --config configs/entropy_clip_cov.py

Hardware: 8 devices of 80 GB in one host, as configs/dapo_qwen2.5_7b_math.py. docs/scaling.md has the memory per
device and the minimum time of a step on 8 x H100. Not run.
Published: AIME-2024 22.1, mean of seven benchmarks 40.4; GRPO 21.2 and 38.6 (verl, recipe/entropy/README.md).

Model: Qwen/Qwen2.5-7B of the Hugging Face hub. Data: one copy of each problem, see configs/dapo_qwen2.5_7b_math.py.

The values are those of verl's recipe/entropy/7b_clip_cov.sh; clip_cov_ratio 0.0002 and its bounds 1 and 5 are the
defaults. The ratio is clipped to 0..2, which is nearly off. clip_ratio_c has no effect on this loss, here or there.

Differences from the script:

- Covariances are computed over the whole mini-batch (there: over each micro-batch).
- The reward is math_verify's (there: a grader of boxed answers, and prompts that ask for a box).
- 300 steps (2400 optimizer steps) are our choice; the script has no last step.
"""

from typing import Any

from dapo_jax.config import default_config


def get_config() -> Any:
    config = default_config()
    config.workdir = "runs/entropy_clip_cov"
    config.model.path = "Qwen/Qwen2.5-7B"
    config.data.train_files = ("data/dapo-math-17k.parquet",)
    config.data.val_files = ("data/aime-2024.parquet",)
    config.data.train_batch_size = 256
    config.data.gen_batch_size = 768
    config.data.max_prompt_length = 2048
    config.data.max_response_length = 8192
    config.data.truncation = "left"
    config.rollout.n = 8
    config.reward.function = "math_verify"
    config.reward.num_workers = 16
    config.actor.ppo_micro_batch_size_per_device = 2
    config.actor.policy_loss.loss_mode = "clip_cov"
    config.actor.clip_ratio_low = 1.0
    config.actor.clip_ratio_high = 1.0
    config.actor.optim.lr_warmup_steps = 0
    config.actor.optim.weight_decay = 0.0
    config.trainer.total_training_steps = 300
    config.trainer.val_before_train = False
    config.trainer.test_freq = 4
    config.trainer.save_freq = 32
    config.trainer.save_minutes = 30.0
    config.mesh.fsdp = 2
    config.mesh.tensor = 4
    config.evaluate.n = 1
    config.evaluate.temperature = 0.0
    return config
