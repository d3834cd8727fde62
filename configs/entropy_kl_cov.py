"""KL-Cov on Qwen2.5-7B: a KL penalty on the tokens of highest covariance (arXiv:2505.22617, equation 12).

    python -m dapo_jax.train --config configs/entropy_kl_cov.py

Hardware: 8 devices of 80 GB in one host, as configs/dapo_qwen2.5_7b_math.py. docs/scaling.md has the memory per
device and the minimum time of a step on 8 x H100. Not run.
Published: AIME-2024 22.6, mean of seven benchmarks 40.6; GRPO 21.2 and 38.6 (verl, recipe/entropy/README.md).

Model: Qwen/Qwen2.5-7B of the Hugging Face hub. Data: one copy of each problem, see configs/dapo_qwen2.5_7b_math.py.

The values are those of verl's recipe/entropy/7b_kl_cov.sh (its kl_cov_ratio for 32B is 0.0002). The script's clip
ranges have no effect on this loss, here or there.

Differences from the script:

- Covariances are computed over the whole mini-batch (there: over each micro-batch).
- The reward is math_verify's (there: a grader of boxed answers, and prompts that ask for a box).
- 300 steps (2400 optimizer steps) are our choice; the script has no last step.
"""

from typing import Any

from entropy_clip_cov import get_config as entropy_clip_cov


def get_config() -> Any:
    config = entropy_clip_cov()
    config.workdir = "runs/entropy_kl_cov"
    config.actor.policy_loss.loss_mode = "kl_cov"
    config.actor.policy_loss.kl_cov_ratio = 0.002
    config.actor.policy_loss.ppo_kl_coef = 1.0
    config.actor.clip_ratio_low = 0.2
    config.actor.clip_ratio_high = 0.28
    return config
