"""SmolLM2-135M-Instruct learns to add, with DAPO and adapters (LoRA), on a laptop's CPU.

    dapo-jax train --config quickstart    (in a clone: bash scripts/quickstart.sh makes an environment first)

Hardware: two CPU cores with AVX2 and 7 GiB of memory; 22 TFLOP, 4 minutes at 105 GFLOP/s, and a minute to compile.
Expect: held-out accuracy (mean@2 on 48 problems) from 0.11 to 0.81, with single seeds from 0.74 to 0.88
(docs/results/dapo.md). The learning rate is constant: with a larger trainer.total_training_steps it goes on.
"""

from typing import Any

from dapo_jax.config import default_config
from dapo_jax.hub.smollm2 import SMOLLM2


def get_config() -> Any:
    config = default_config()
    config.workdir = "runs/quickstart"
    config.model.path = SMOLLM2
    config.model.enable_gradient_checkpointing = False
    config.model.lora.rank = 16
    config.model.lora.alpha = 32.0
    config.data.task = "arithmetic"
    config.data.arithmetic.high = 20
    config.data.arithmetic.num_heldout = 48
    config.data.arithmetic.template = "Calculate {a} {operator} {b}. Answer with the number only."
    config.data.system_prompt = ""
    config.data.train_batch_size = 8
    config.data.gen_batch_size = 24
    config.data.max_prompt_length = 64
    config.data.max_response_length = 12
    config.rollout.n = 8
    config.rollout.max_num_seqs = 256
    config.reward.overlong_buffer.enable = True
    config.reward.overlong_buffer.len = 2
    config.algorithm.filter_groups.leftover = "carry"
    config.actor.ppo_mini_batch_size = 4
    config.actor.ppo_micro_batch_size_per_device = 32
    config.actor.optim.lr = 4e-4
    config.actor.optim.lr_warmup_steps = 2
    config.actor.optim.weight_decay = 0.0
    config.evaluate.n = 2
    config.trainer.total_training_steps = 16
    config.trainer.test_freq = 3
    config.trainer.save_freq = 3
    config.monitor.alarms.entropy_collapse = 0.03  # answers settle on one sentence, whose digits alone stay uncertain
    return config
