"""Qwen2.5-7B with all of DAPO and short responses: verl's recipe/dapo/test_dapo_7b.sh.

    python -m dapo_jax.train --config configs/dapo_qwen2.5_7b.py

Hardware: 8 devices of 80 GB in one host. docs/scaling.md has the memory per device and the minimum time of a step
of one round on 8 x H100. Not run.
Published: only the settings, as a test of the recipe (verl); no accuracy.

Model: Qwen/Qwen2.5-7B of the Hugging Face hub. The script's default is Qwen2.5-Math-7B; choose it with
--config.model.path. Data: one copy of each problem, see configs/dapo_qwen2.5_7b_math.py.

A step trains on 512 prompts. It samples 1536 per round, at most ten rounds, with 16 responses each, and takes 16
optimizer steps of 32 prompts. Prompts and responses have up to 2048 tokens; the last 512 of a response are penalised.

Differences from the script:

- token-mean is exact over the mini-batch (there: a mean over GPUs and micro-batches).
- Old log-probabilities are the sampler's (there: recomputed).
- Surplus groups are sampled again (there: lost).
- The first of 10 warm-up steps has lr / 10 (there: 0).
- 200 steps are our choice. The script stops after one pass over its file, which has every problem about 100 times.
- Evaluation draws 32 samples per problem (there: one).
"""

from typing import Any

from dapo_jax.config import default_config


def get_config() -> Any:
    config = default_config()
    config.workdir = "runs/dapo_qwen2.5_7b"
    config.model.path = "Qwen/Qwen2.5-7B"
    config.data.train_files = ("data/dapo-math-17k.parquet",)
    config.data.val_files = ("data/aime-2024.parquet",)
    config.data.gen_batch_size = 1536
    config.data.max_prompt_length = 2048
    config.data.max_response_length = 2048
    config.data.truncation = "left"
    config.reward.num_workers = 16
    config.reward.overlong_buffer.enable = True
    config.reward.overlong_buffer.len = 512
    config.actor.ppo_micro_batch_size_per_device = 4
    config.actor.optim.lr_warmup_steps = 10
    config.trainer.total_training_steps = 200
    config.trainer.test_freq = 2
    config.trainer.save_freq = 2
    config.mesh.fsdp = 2
    config.mesh.tensor = 4
    config.evaluate.n = 32
    return config
