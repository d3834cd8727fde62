"""Qwen3.5-0.8B, three of four layers with linear attention, with DAPO on GSM8K: otherwise configs/gsm8k.py.

    python -m dapo_jax.train --config configs/qwen3.5_0.8b_gsm8k.py

Hardware: one GPU of 80 GB such as an H100, or a v5e:2x4 slice with --config.mesh.fsdp=8. Not run, so neither time nor
result is known. Published: nothing for this recipe.

Model: the text part of Qwen/Qwen3.5-0.8B of the Hugging Face hub; its vision tower is not read, and an export is a
language model. Thinking is switched off in the template, so that answers fit 512 tokens. While a response is sampled,
it takes 20 MB for the states of 18 layers, however long it is, and keys and values in the other 6 layers.
"""

from typing import Any

from dapo_jax.config import default_config


def get_config() -> Any:
    config = default_config()
    config.workdir = "runs/qwen3.5_0.8b_gsm8k"
    config.model.path = "Qwen/Qwen3.5-0.8B"
    config.data.train_files = ("hf://openai/gsm8k/main/train",)
    config.data.val_files = ("hf://openai/gsm8k/main/test",)
    config.data.chat_template_kwargs = '{"enable_thinking": false}'
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
