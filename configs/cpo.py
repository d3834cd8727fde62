"""CPO on Qwen3-4B-Base: GRPO whose advantages are corrected by a hint with the solution; no group filter.

    python -m dapo_jax.train --config configs/cpo.py

Hardware: 8 devices of 80 GB in one host. docs/scaling.md has the memory per device and the minimum time of a step on
8 x H100. Not run.
Published: only the settings, as run_qwen3_base_math_grpo_cpo_seqkl_neg.sh of a fork of verl (adv_estimator=cpo); no
accuracy.

Model: Qwen/Qwen3-4B-Base of the Hugging Face hub. Data: one copy of each problem, see configs/dapo_qwen2.5_7b_math.py.
The hint is a row's extra_info["solution"]; these files have none, so the hint is the answer.

From the script: 1024 prompts with 8 responses each, 4 optimizer steps of 256 prompts, KL loss 0.001, cpo_lambda 2,
pos_alpha 0, neg_alpha 1 and wrap_method seq_kl. seq_kl reads only its own kl_alpha (here the default), not the other
three: it adds kl_alpha times the response's KL to every token's advantage. The script trains on MATH with its own
grader, for 20 epochs; this recipe uses math_verify and 20 epochs of the problems above.
"""

from typing import Any

from dapo_jax.config import default_config


def get_config() -> Any:
    config = default_config()
    config.workdir = "runs/cpo"
    config.model.path = "Qwen/Qwen3-4B-Base"
    config.data.train_files = ("data/dapo-math-17k.parquet",)
    config.data.val_files = ("data/aime-2024.parquet",)
    config.data.train_batch_size = 1024
    config.data.max_prompt_length = 2048
    config.data.max_response_length = 16384
    config.data.filter_overlong_prompts = True
    config.rollout.n = 8
    config.reward.function = "math_verify"
    config.reward.num_workers = 16
    config.algorithm.adv_estimator = "cpo"
    config.algorithm.cpo.wrap_method = "seq_kl"
    config.algorithm.filter_groups.enable = False
    config.actor.ppo_mini_batch_size = 256
    config.actor.ppo_micro_batch_size_per_device = 1
    config.actor.clip_ratio_high = 0.2
    config.actor.clip_ratio_c = 3.0
    config.actor.use_kl_loss = True
    config.actor.optim.lr_warmup_steps = 0
    config.actor.optim.weight_decay = 0.01
    config.trainer.total_training_steps = -1
    config.trainer.total_epochs = 20
    config.trainer.test_freq = 7
    config.trainer.save_freq = 7
    config.mesh.fsdp = 2
    config.mesh.tensor = 4
    config.evaluate.n = 1
    config.evaluate.temperature = 0.0
    return config
