"""Qwen3-30B-A3B, a mixture of experts, with DAPO's published batches and lengths: see configs/dapo_qwen2.5_32b_math.py.

    python -m dapo_jax.train --config configs/qwen3_30b_a3b_math.py

Hardware: 64 devices of 95 GB on several hosts (docs/scaling.md), such as a v5p:4x4x4 slice; or 16 x H100 on two hosts
with --config.mesh.fsdp=4 --config.mesh.expert=1 --config.mesh.tensor=4. Not run.
Published: AIME-2024 of 80.4 with thinking and up to 32768 tokens, before any such training (Qwen3's report,
arXiv:2505.09388). That is where to start from, not a result of this recipe: DAPO's own numbers are of a dense model.

Model: Qwen/Qwen3-30B-A3B of the Hugging Face hub, or Qwen3-30B-A3B-Base with the same shape. Data: one copy of each
problem, see configs/dapo_qwen2.5_7b_math.py. Responses think; --config.data.chat_template_kwargs='{"enable_thinking":
false}' turns it off.

From DAPO's script: 512 prompts with 16 responses each from rounds of 1536 prompts, mini-batches of 32 prompts, 2048 +
20480 tokens, and the losses. The router is trained with the policy loss alone: no auxiliary loss balances the experts.

Memory: a device holds 12 bytes of parameters and moments for each of 30.5 billion parameters, shared by all.
mesh.expert divides the 128 experts by 4 (docs/scaling.md), in sampling too, and mesh.fsdp each expert's 2048 inputs by
16. On H100s, whose two hosts are far apart, it brings nothing in training: there mesh.tensor divides the experts and
the 32 heads (4 key-value heads) by 4 in sampling, and training has fsdp 16 (mesh.train_tensor).
"""

from typing import Any

from dapo_jax.config import default_config


def get_config() -> Any:
    config = default_config()
    config.workdir = "runs/qwen3_30b_a3b_math"
    config.model.path = "Qwen/Qwen3-30B-A3B"
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
    config.actor.optim.lr_warmup_steps = 10
    config.trainer.total_training_steps = 330
    config.trainer.test_freq = 5
    config.trainer.save_freq = 5
    config.trainer.save_minutes = 30.0
    config.mesh.fsdp = 16
    config.mesh.expert = 4
    config.evaluate.n = 32
    config.evaluate.top_p = 0.7
    return config
