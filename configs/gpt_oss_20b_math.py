"""gpt-oss-20b, a mixture of experts, with DAPO's published batches and lengths: see configs/dapo_qwen2.5_32b_math.py.

    python -m dapo_jax.train --config configs/gpt_oss_20b_math.py

Hardware: 16 devices of 80 GB on two hosts (docs/scaling.md), such as 16 x H100. Not run.
Published: gpt-oss' model card (arXiv:2508.10925) has AIME scores at low, medium and high reasoning effort, before any
such training. That is where to start from; a result of this recipe is not published. DAPO's own numbers are of a dense
model.

Model: openai/gpt-oss-20b of the Hugging Face hub, whose experts in MXFP4 become float32 parameters, trained with
products in bfloat16. Data: one copy of each problem, see configs/dapo_qwen2.5_7b_math.py. The template asks for medium
reasoning effort; --config.data.chat_template_kwargs='{"reasoning_effort": "low"}' changes it.

From DAPO's script: 512 prompts with 16 responses each from rounds of 1536 prompts, mini-batches of 32 prompts, 2048 +
20480 tokens, and the losses. The router is trained with the policy loss alone: no auxiliary loss balances the experts.

Memory: a device holds 12 bytes of parameters and moments for each of 20.9 billion parameters, shared by all. In
sampling, mesh.tensor divides the 32 experts and the 64 heads (8 key-value heads) by 4; training has fsdp 16
(mesh.train_tensor, docs/scaling.md), which divides each expert's 2880 inputs.
"""

from typing import Any

from dapo_jax.config import default_config


def get_config() -> Any:
    config = default_config()
    config.workdir = "runs/gpt_oss_20b_math"
    config.model.path = "openai/gpt-oss-20b"
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
    config.mesh.fsdp = 4
    config.mesh.tensor = 4
    config.evaluate.n = 32
    config.evaluate.top_p = 0.7
    return config
