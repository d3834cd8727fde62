"""Gemma 3 1B with adapters (LoRA) and DAPO on GSM8K: the sizes of configs/gsm8k.py, greedy evaluation on the test set.

    python -m dapo_jax.train --config configs/gemma3_1b_gsm8k_lora.py

Hardware: 8 devices of 16 GB such as a v5e:2x4 slice, or one of 32 GB such as a v6e:1x1, with the same settings. Not
run, so no time and no accuracy are known.
Published: 62.8 % of the test problems before any such training (Gemma 3's report, arXiv:2503.19786). That is where
to start from, with other prompts and another grader, not a result of this recipe.

Model and data: google/gemma-3-1b-it, whose licence must be accepted first (then `hf auth login`), and openai/gsm8k are
downloaded from the Hugging Face hub. The model's template puts a system message, such as data.system_prompt, before the
first message of the user. A response ends with <end_of_turn>.

Memory: each device has a whole copy of the frozen weights, since the model has one key-value head and mesh.tensor
cannot divide it. The scores of 262,144 tokens are computed in blocks. --config.mesh.fsdp=8 shards the weights too.

Only adapters of rank 32 on all matrices are trained and saved, at ten times the learning rate of a whole model.
`python -m dapo_jax.export --adapter` writes them for PEFT.
"""

from typing import Any

from dapo_jax.config import default_config


def get_config() -> Any:
    config = default_config()
    config.workdir = "runs/gemma3_1b_gsm8k_lora"
    config.model.path = "google/gemma-3-1b-it"
    config.model.lora.rank = 32
    config.model.lora.alpha = 32.0
    config.data.train_files = ("hf://openai/gsm8k/main/train",)
    config.data.val_files = ("hf://openai/gsm8k/main/test",)
    config.data.train_batch_size = 256
    config.data.gen_batch_size = 384
    config.data.max_prompt_length = 512
    config.data.max_response_length = 512
    config.rollout.n = 8
    config.reward.num_workers = 8
    config.actor.ppo_mini_batch_size = 64
    config.actor.ppo_micro_batch_size_per_device = 4
    config.actor.optim.lr = 1e-5
    config.actor.optim.lr_warmup_steps = 5
    config.trainer.total_training_steps = 100
    config.trainer.save_freq = 20
    config.evaluate.n = 1
    config.evaluate.temperature = 0.0
    return config
