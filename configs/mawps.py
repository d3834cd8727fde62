"""SmolLM2-135M-Instruct learns word problems of one and two steps (MAWPS) with DAPO, on two CPU cores.

    python scripts/data/prepare_mawps.py singleop.jsonl addsub.jsonl multiarith.jsonl
    python -m dapo_jax.train --config configs/mawps.py

Hardware: two CPU cores and 12 GiB of memory; 45 minutes with evaluation. Expect: answers that end, and a training
accuracy that rises from .03 to between .07 and .20. Held-out accuracy (greedy) goes from .065 to .093, with a standard
error of .02 (docs/results/dapo.md). No held-out problem shares its template with any of the 1258 training
problems (docs/data.md).
"""

from typing import Any

from dapo_jax.config import default_config
from dapo_jax.hub.smollm2 import SMOLLM2


def get_config() -> Any:
    config = default_config()
    config.workdir = "runs/mawps"
    config.model.path = SMOLLM2
    config.model.enable_gradient_checkpointing = False
    config.data.train_files = ("data/mawps/train.parquet",)
    config.data.val_files = ("data/mawps/heldout.parquet",)
    config.data.system_prompt = ""
    config.data.train_batch_size = 8
    config.data.gen_batch_size = 24
    config.data.max_prompt_length = 256
    config.data.max_response_length = 24
    config.rollout.n = 8
    config.rollout.max_num_seqs = 192
    config.rollout.decode_chunk_length = 8
    config.actor.ppo_mini_batch_size = 2
    config.actor.ppo_micro_batch_size_per_device = 16
    config.actor.optim.lr = 1.2e-5
    config.actor.optim.lr_scheduler_type = "cosine"
    config.actor.optim.min_lr_ratio = 0.1
    config.actor.optim.lr_warmup_steps = 2
    config.actor.optim.weight_decay = 0.0
    config.trainer.total_training_steps = 24
    config.trainer.test_freq = 12
    config.trainer.save_freq = 12
    config.evaluate.n = 1
    config.evaluate.temperature = 0.0
    return config
