"""Qwen2.5-Math-7B with DAPO's loss and penalty but no group filter: verl's recipe/dapo/test_dapo_7b_math.sh.

    python -m dapo_jax.train --config configs/dapo_qwen2.5_7b_math.py

Hardware: 8 devices of 80 GB in one host. docs/scaling.md has the memory per device and the minimum time of a step on
8 x H100, 8 x A100 and a v5p:2x2x2 slice. Not run.
Published: AIME-2024 avg@32 of 36.3 within 200 steps, with verl on 64 GPUs (verl, docs/algo/baseline.md).

Model: Qwen/Qwen2.5-Math-7B of the Hugging Face hub. Data: BytedTsinghua-SIA/DAPO-Math-17k and
BytedTsinghua-SIA/AIME-2024 of the hub. Their files have every problem about 100 and 32 times. Use one copy of each,
since evaluate.n draws the 32 samples and training repeats the prompts for any number of epochs:

    dapo-jax data dapo-math-17k
    dapo-jax data aime-2024

docs/one_node.md goes from an empty machine to a served model with this recipe; scripts/launch/run_dapo_math.sh does it
in one command: data, preflight, training, evaluation, export.

Memory: in sampling, mesh.tensor divides the 28 heads (4 key-value heads) by 4; training has fsdp 8 (mesh.train_tensor,
docs/scaling.md). As many responses are decoded at once as fit rollout.kv_memory_share of what parameters, moments and
decoding weights leave free. The fused attention stores no scores.

Differences from the published run:

- token-mean is exact over the mini-batch (there: a mean over GPUs and micro-batches).
- Old log-probabilities are the sampler's (there: recomputed).
- The first of 10 warm-up steps has lr / 10 (there: 0; the paper warms up for 20).
- Positions have no limit, so max_position_embeddings=32768 needs no override.
"""

from typing import Any

from dapo_jax.config import default_config


def get_config() -> Any:
    config = default_config()
    config.workdir = "runs/dapo_qwen2.5_7b_math"
    config.model.path = "Qwen/Qwen2.5-Math-7B"
    config.data.train_files = ("data/dapo-math-17k.parquet",)
    config.data.val_files = ("data/aime-2024.parquet",)
    config.data.max_prompt_length = 2048
    config.data.max_response_length = 8192
    config.data.truncation = "left"
    config.reward.num_workers = 16
    config.reward.overlong_buffer.enable = True
    config.reward.overlong_buffer.len = 4096
    config.algorithm.filter_groups.enable = False
    config.actor.ppo_micro_batch_size_per_device = 2
    config.actor.optim.lr_warmup_steps = 10
    config.trainer.total_training_steps = 200
    config.trainer.save_minutes = 30.0
    config.mesh.fsdp = 2
    config.mesh.tensor = 4
    config.evaluate.n = 32
    config.evaluate.top_p = 0.7
    return config
