"""Qwen2.5-7B with all of DAPO and short responses: verl's recipe/dapo/test_dapo_7b.sh.

    python -m dapo_jax.train --config configs/dapo_qwen2.5_7b.py

Hardware: 8 devices of 80 GB in one host. The preflight counts 34 GiB a device on 8 x H100 and a least time of 15
minutes per step of one round, if every response runs to its limit. Not run.
Published: the settings alone, as a test of the recipe (verl); no accuracy.

Model: Qwen/Qwen2.5-7B of the Hugging Face hub; the script's default is Qwen2.5-Math-7B, whose name --config.model.path
takes as well. Data: one copy of each problem, see configs/dapo_qwen2.5_7b_math.py.

512 prompts are trained on, 1536 sampled per round, at most ten rounds; 16 responses each, 16 optimizer steps of 32
prompts. Prompts and responses have up to 2048 tokens, and the last 512 of a response are penalised.

Differences: token-mean is exact over the mini-batch (there a mean over GPUs and micro-batches); old log-probabilities
are the sampler's (there recomputed); surplus groups are sampled again (there lost); the first of 10 warm-up steps has
lr / 10 (there 0). The script stops after one pass over its file, which holds every problem about 100 times; 200 steps
are our choice, and 32 samples per problem of evaluation (there one).
"""

from typing import Any

from dapo_jax.config import default_config


def get_config() -> Any:
    config = default_config()
    config.workdir = "runs/dapo_qwen2.5_7b"
    config.model.path = "models/Qwen2.5-7B"
    config.data.train_files = ("data/dapo-math-17k.parquet",)
    config.data.val_files = ("data/aime-2024.parquet",)
    config.data.gen_batch_size = 1536
    config.data.max_prompt_length = 2048
    config.data.max_response_length = 2048
    config.data.truncation = "left"
    config.rollout.max_num_seqs = 1024
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
