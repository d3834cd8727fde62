"""SmolLM3-3B with DAPO on math, without thinking: a quarter of the published batch, so that one host takes it.

    python -m dapo_jax.train --config configs/smollm3_3b_math.py

Hardware: 8 devices of 80 GB in one host, such as 8 x H100; or 16 devices of 16 GB, a v5e:4x4 slice, with
--config.mesh.fsdp=4 --config.actor.ppo_micro_batch_size_per_device=1 (mesh.tensor=1 does not fit there). Not run.
Published: 9.3 % of AIME-2025 without thinking and 36.7 % with it, before any such training (the model's card). That is
where to start from, not a result of this recipe.

Model: HuggingFaceTB/SmolLM3-3B of the Hugging Face hub. Data: one copy of each problem, see
configs/dapo_qwen2.5_7b_math.py. data.chat_template_kwargs turns thinking off, since thoughts may need more tokens than
data.max_response_length. The template's system message has a date, which is always the same here.

From DAPO's recipe: clip-higher, the group filter, the token mean, the soft punishment of overlong responses, 16
responses per prompt and 32 prompts per optimizer step. Differences: 128 prompts per step (there: 512), so a batch makes
4 updates (there: 16), and 8192 tokens (there: 20480).

Memory: in sampling, mesh.tensor divides the 16 heads (4 key-value heads) by 4; training has fsdp 8 (mesh.train_tensor,
docs/scaling.md). Every fourth layer has no rotary embedding; all attend to all tokens.
"""

from typing import Any

from dapo_jax.config import default_config


def get_config() -> Any:
    config = default_config()
    config.workdir = "runs/smollm3_3b_math"
    config.model.path = "HuggingFaceTB/SmolLM3-3B"
    config.data.train_files = ("data/dapo-math-17k.parquet",)
    config.data.val_files = ("data/aime-2024.parquet",)
    config.data.chat_template_kwargs = '{"enable_thinking": false}'
    config.data.train_batch_size = 128
    config.data.gen_batch_size = 192
    config.data.max_prompt_length = 2048
    config.data.max_response_length = 8192
    config.data.truncation = "left"
    config.reward.num_workers = 16
    config.reward.overlong_buffer.enable = True
    config.reward.overlong_buffer.len = 4096
    config.actor.ppo_micro_batch_size_per_device = 2
    config.actor.optim.lr_warmup_steps = 10
    config.trainer.total_training_steps = 400
    config.trainer.test_freq = 20
    config.trainer.save_freq = 20
    config.trainer.save_minutes = 30.0
    config.mesh.fsdp = 2
    config.mesh.tensor = 4
    config.evaluate.n = 32
    config.evaluate.top_p = 0.7
    return config
