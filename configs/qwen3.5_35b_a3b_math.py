"""Qwen3.5-35B-A3B, experts and linear attention, with DAPO's published lengths: see configs/dapo_qwen2.5_32b_math.py.

    python -m dapo_jax.train --config configs/qwen3.5_35b_a3b_math.py

Hardware: 16 devices of 80 GB on two hosts. Compiled for 16 H100s, all programs take 66.7 of 71.2 GiB (docs/scaling.md),
and a step of longest responses at least 3.9 hours, 3.1 of them sampling. It has not been run. On 64 devices:
--config.mesh.fsdp=16.
Published: nothing for this recipe.

Model: the text part of Qwen/Qwen3.5-35B-A3B of the Hugging Face hub; its vision tower is not read. The shape in
configs/shapes is that of transformers' Qwen3_5MoeTextConfig, with the rotary base of Qwen3.5-0.8B. Data: one copy of
each problem, see configs/dapo_qwen2.5_7b_math.py. Responses think; --config.data.chat_template_kwargs=
'{"enable_thinking": false}' turns it off.

From DAPO's script: 512 prompts with 16 responses each from rounds of 1536 prompts, mini-batches of 32 prompts, 2048 +
20480 tokens, and the losses. The router is trained with the policy loss alone: no auxiliary loss balances the experts.

Memory: a device holds 12 bytes of parameters and moments for each of 34.7 billion parameters, shared by all.
mesh.expert divides the 256 experts by 4 (docs/scaling.md), in sampling too, and mesh.fsdp each expert's 2048 inputs by
4. The update divides heads by 2 and scores of the vocabulary by 512 tokens: its temporaries take 34 GiB, 47 without the
former. In sampling a response takes 64 MB for the states of 30 layers, and keys and values in the other 10 layers.
"""

from typing import Any

from dapo_jax.config import default_config


def get_config() -> Any:
    config = default_config()
    config.workdir = "runs/qwen3.5_35b_a3b_math"
    config.model.path = "Qwen/Qwen3.5-35B-A3B"
    config.data.train_files = ("data/dapo-math-17k.parquet",)
    config.data.val_files = ("data/aime-2024.parquet",)
    config.data.gen_batch_size = 1536
    config.data.max_prompt_length = 2048
    config.data.max_response_length = 20480
    config.data.truncation = "left"
    config.reward.num_workers = 16
    config.reward.overlong_buffer.enable = True
    config.reward.overlong_buffer.len = 4096
    config.actor.ppo_micro_batch_size_per_device = 1
    config.actor.logprob_chunk_size = 512
    config.actor.optim.lr_warmup_steps = 10
    config.trainer.total_training_steps = 330
    config.trainer.test_freq = 5
    config.trainer.save_freq = 5
    config.trainer.save_minutes = 30.0
    config.mesh.fsdp = 4
    config.mesh.expert = 4
    config.mesh.train_tensor = 2
    config.evaluate.n = 32
    config.evaluate.top_p = 0.7
    return config
