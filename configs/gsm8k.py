"""Qwen2.5-0.5B-Instruct with DAPO on GSM8K: verl's sizes, greedy evaluation on the 1319 test problems.

    python -m dapo_jax.train --config configs/gsm8k.py

Hardware: one GPU of 24 GB such as an L4, one H100, or a v5e:2x2 slice with --config.mesh.fsdp=4; docs/scaling.md has
the memory per device and the minimum time of a step. Not run, so no real time is known. For a larger model set
--config.model.path, such as Qwen/Qwen2.5-1.5B-Instruct on v5e:2x4 with --config.mesh.fsdp=8.
Published: from 49.6 % of the test problems to 56.7 with PPO and 54.3 with GRPO on adapters (verl,
docs/algo/baseline.md). That is the bar, not a result of this recipe.

Model and data come from the Hugging Face hub (docs/data.md). Sizes are those of verl's examples: prompts of 512
tokens, 256 prompts per step, 64 per optimizer step, learning rate 1e-6. Differences: DAPO's filter, clip and token
mean, 8 samples, no KL loss. 100 steps pass through the training problems about three and a half times, and more often
the more groups the filter drops.
"""

from typing import Any

from dapo_jax.config import default_config


def get_config() -> Any:
    config = default_config()
    config.workdir = "runs/gsm8k"
    config.model.path = "Qwen/Qwen2.5-0.5B-Instruct"
    config.data.train_files = ("hf://openai/gsm8k/main/train",)
    config.data.val_files = ("hf://openai/gsm8k/main/test",)
    config.data.train_batch_size = 256
    config.data.gen_batch_size = 384
    config.data.max_prompt_length = 512
    config.data.max_response_length = 512
    config.rollout.n = 8
    config.reward.num_workers = 8
    config.actor.ppo_mini_batch_size = 64
    config.actor.ppo_micro_batch_size_per_device = 16
    config.actor.optim.lr_warmup_steps = 5
    config.trainer.total_training_steps = 100
    config.trainer.save_freq = 20
    config.evaluate.n = 1
    config.evaluate.temperature = 0.0
    return config
