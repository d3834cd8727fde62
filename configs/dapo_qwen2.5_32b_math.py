"""DAPO as published, on Qwen2.5-32B: verl's recipe/dapo/run_dapo_qwen2.5_32b.sh (arXiv:2503.14476, section 4).

    python -m dapo_jax.train --config configs/dapo_qwen2.5_32b_math.py

Hardware: 128 devices of 95 GB on several hosts (docs/scaling.md), such as a v5p:4x4x8 slice; or 32 x H100 on four hosts
with --config.mesh.fsdp=4. docs/scaling.md has the memory per device and the minimum time of a step. Not run.
Published: AIME-2024 avg@32 of 50 after 5280 optimizer steps, 330 training steps (the paper's table 1 and figure 1), on
128 GPUs. verl's reproduction reaches 52; 50 without dynamic sampling; 44 also without the token-level loss (verl,
recipe/dapo/README.md).

Model: Qwen/Qwen2.5-32B of the Hugging Face hub. Data: one copy of each problem, see configs/dapo_qwen2.5_7b_math.py.

Memory: in sampling, mesh.tensor divides the 40 heads (8 key-value heads) and the decoding weights by 8; training has
fsdp 128 (mesh.train_tensor, docs/scaling.md). As many responses are decoded at once as fit rollout.kv_memory_share of
what parameters, moments and decoding weights leave free. The fused attention stores no scores; heads x tokens x tokens
in float32 would be 81 GB per layer for one response of maximum length.

Differences from the published run:

- Surplus groups are sampled again by the next policy (there: discarded).
- token-mean is exact over the mini-batch (there: a mean over GPUs and micro-batches).
- Old log-probabilities are the sampler's (there: recomputed).
- The first of 10 warm-up steps has lr / 10 (there: 0; the paper warms up for 20).
- The script has no last step.
"""

from typing import Any

from dapo_jax.config import default_config


def get_config() -> Any:
    config = default_config()
    config.workdir = "runs/dapo_qwen2.5_32b_math"
    config.model.path = "Qwen/Qwen2.5-32B"
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
    config.mesh.tensor = 8
    config.evaluate.n = 32
    config.evaluate.top_p = 0.7
    return config
