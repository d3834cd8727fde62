"""SmolLM2-135M-Instruct learns to use a calculator for sums that it cannot do alone, on a laptop's CPU.

    python configs/calculator.py    (writes data/calculator/train.jsonl and heldout.jsonl)
    python -m dapo_jax.train --config configs/calculator.py

Hardware: two CPU cores with AVX2 and 8 GiB of memory. Expect: held-out accuracy (mean@2 on 24 sums)
from 0.40 to 0.92 (1.00, 0.94 and 0.83 of three seeds), with 320 seconds of processor time, compiling included; without
the calculator it stays at 0.00 (docs/results/environments.md). The model calls from the start, as the prompt shows two
calls. It learns to copy the result, with its sign, and to stop.
"""

import json
import random
import re
from pathlib import Path
from typing import Any

from dapo_jax.config import default_config
from dapo_jax.hub.smollm2 import SMOLLM2

FOLDER = Path("data/calculator")
EXAMPLES = "12 + 7", "35 - 6"  # how a call is written: the model is shown these before its question
NUMBERS = {"train": 400, "heldout": 24}


class Calculator:
    """Text form: a turn `calc: 812 + 4096` is answered with the result, any other turn is the answer."""

    def reset(self, answer: str, **row: Any) -> None:
        self.answer, self.called = answer, 0.0

    def step(self, text: str) -> tuple[str | None, float, bool, dict[str, float]]:
        call = re.match(r"calc: *(\d+) *([+-]) *(\d+)", text)
        if call and not self.called:
            self.called = 1.0
            return f"= {worked_out(*call.groups())}", 0.0, False, {"called": 1.0}
        right = re.findall(r"-?\d+", text)[-1:] == [self.answer]
        return None, float(right), True, {"called": self.called}


def worked_out(left: str, sign: str, right: str) -> int:
    return int(left) + int(sign + right)


def rows(number: int, seed: int) -> list[dict[str, Any]]:
    """Sums and differences of two numbers of three or four digits, each after two examples of a call."""
    dice, found = random.Random(seed), []
    for _ in range(number):
        terms = str(dice.randrange(100, 10_000)), dice.choice("+-"), str(dice.randrange(100, 10_000))
        chat = []
        for example in EXAMPLES:
            chat += [
                {"role": "user", "content": f"{example} = ?"},
                {"role": "assistant", "content": f"calc: {example}"},
            ]
        chat.append({"role": "user", "content": f"{' '.join(terms)} = ?"})
        truth = {"style": "rule", "ground_truth": str(worked_out(*terms))}
        found.append({"prompt": chat, "data_source": "arithmetic", "reward_model": truth})
    return found


def get_config() -> Any:
    config = default_config()
    config.workdir = "runs/calculator"
    config.model.path = SMOLLM2
    config.model.enable_gradient_checkpointing = False
    config.model.lora.rank = 16
    config.model.lora.alpha = 32.0
    config.environment.path = f"{Path(__file__).absolute()}:Calculator"
    config.environment.max_turns = 2
    config.data.train_files = (str(FOLDER / "train.jsonl"),)
    config.data.val_files = (str(FOLDER / "heldout.jsonl"),)
    config.data.system_prompt = ""
    config.data.train_batch_size = 4
    config.data.gen_batch_size = 6
    config.data.max_prompt_length = 84
    config.data.max_response_length = 40
    config.rollout.n = 8
    config.rollout.max_num_seqs = 64
    config.reward.overlong_buffer.enable = True
    config.reward.overlong_buffer.len = 8
    config.algorithm.filter_groups.max_num_gen_batches = 1
    config.algorithm.filter_groups.on_limit = "partial"
    config.algorithm.filter_groups.on_empty = "train_unfiltered"
    config.actor.ppo_mini_batch_size = 2
    config.actor.ppo_micro_batch_size_per_device = 16
    config.actor.optim.lr = 4e-4
    config.actor.optim.lr_warmup_steps = 2
    config.actor.optim.weight_decay = 0.0
    config.evaluate.n = 2
    config.trainer.total_training_steps = 4
    config.trainer.test_freq = 2
    config.trainer.save_freq = 4
    return config


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for seed, (split, number) in enumerate(NUMBERS.items()):
        text = "".join(f"{json.dumps(row)}\n" for row in rows(number, seed))
        (FOLDER / f"{split}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
