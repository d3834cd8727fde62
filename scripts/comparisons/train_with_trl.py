"""TRL's side of compare_trl.py, which starts it in TRL's environment.

    python scripts/comparisons/train_with_trl.py WORKDIR

Reads WORKDIR/settings.json, trains with GRPOTrainer, and writes metrics.jsonl and environment.json like a run of
dapo_jax.
"""

if __name__ == "__main__":  # before torch and trl, which only TRL's environment has
    import argparse

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workdir")
    given = parser.parse_args()

import json
import os
import platform
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
import trl  # pyright: ignore[reportMissingImports]
from datasets import Dataset  # pyright: ignore[reportMissingImports]
from trl.rewards import get_soft_overlong_punishment  # pyright: ignore[reportMissingImports]
from trl_task import batches, is_right, length_of, rows_of

EVALUATION_BATCH = 64  # responses


def main(workdir: Path) -> None:
    given = json.loads((workdir / "settings.json").read_text())
    (workdir / "environment.json").write_text(json.dumps(environment(given)))
    model, tokenizer = load(Path(given["model"]))
    records = Records(workdir, given, tokenizer)
    rewards: list[Any] = [records.accuracy]
    if given["overlong_buffer"]:
        rewards.append(get_soft_overlong_punishment(given["max_tokens"], given["overlong_buffer"]))
    trainer = Trainer(
        records,
        model=model,
        reward_funcs=rewards,
        args=config_of(given, workdir),
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(rows_of(given["train_files"])),
        callbacks=[records],
    )
    trainer.train()


def environment(given: dict[str, Any]) -> dict[str, Any]:
    """Versions and machine, in the form of our runs."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    libraries = {"torch": torch, "transformers": transformers, "trl": trl}
    versions = {name: library.__version__ for name, library in libraries.items()}
    return {
        "versions": {"python": platform.python_version(), **versions},
        "devices": f"1 x {device}",
        "processes": 1,
        "host": given["host"],
    }


def load(path: Path) -> tuple[Any, Any]:
    """The float32 model and the tokenizer of a directory."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, padding_side="left")
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), tokenizer


def config_of(given: dict[str, Any], workdir: Path) -> Any:
    """GRPOConfig with our settings."""
    updates = given["updates_per_step"]
    return trl.GRPOConfig(
        output_dir=str(workdir / "trl"),
        seed=given["seed"],
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        per_device_train_batch_size=given["rows_per_update"],
        gradient_accumulation_steps=1,
        steps_per_generation=updates,
        max_steps=given["steps"] * updates,
        num_generations=given["samples"],
        max_completion_length=given["max_tokens"],
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        loss_type="dapo",
        epsilon=given["clip_low"],
        epsilon_high=given["clip_high"],
        beta=0.0,
        mask_truncated_completions=given["mask_truncated"],
        learning_rate=1.0,  # times that of the step
        adam_beta1=given["betas"][0],
        adam_beta2=given["betas"][1],
        weight_decay=given["weight_decay"],
        max_grad_norm=given["grad_clip"],
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


class Records(transformers.TrainerCallback):
    """Writes a row for each of our steps, which are several updates of TRL's; row 0 is the evaluation before."""

    def __init__(self, workdir: Path, given: dict[str, Any], tokenizer: Any) -> None:
        self.given, self.tokenizer = given, tokenizer
        self.heldout = rows_of(given["val_files"])
        self.file = open(workdir / "metrics.jsonl", "w")
        self.forget()

    def forget(self) -> None:
        """Starts a step."""
        self.seconds = 0.0
        self.accuracies: list[float] = []
        self.completions: list[list[int]] = []
        self.updates: list[dict[str, float]] = []  # what TRL logs of each

    def accuracy(self, completions: list[list[dict[str, str]]], ground_truth: list[str], **_: Any) -> list[float]:
        """Reward function: 1 for a right answer."""
        found = [is_right(turns[0]["content"], truth) for turns, truth in zip(completions, ground_truth, strict=True)]
        self.accuracies += found
        return found

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        self.write({"step": 0, **self.evaluated(model)})

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.start = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds += time.perf_counter() - self.start

    def on_log(self, args: Any, state: Any, control: Any, model: Any, logs: dict[str, float], **_: Any) -> None:
        if "entropy" not in logs:  # the last ones, of the whole training
            return
        self.updates.append(logs)
        if state.global_step % self.given["updates_per_step"]:
            return
        step = state.global_step // self.given["updates_per_step"]
        row = {"step": step, **self.of_step()}
        if step % self.given["test_freq"] == 0 or step == self.given["steps"]:
            row |= self.evaluated(model)
        self.write(row)
        self.forget()

    def of_step(self) -> dict[str, float]:
        """The metrics of the step that ends, under our names."""
        samples, number = self.given["samples"], len(self.accuracies)
        groups = [set(self.accuracies[start : start + samples]) for start in range(0, number, samples)]
        generated = sum(map(len, self.completions))
        return {
            "timing_s/step": self.seconds,
            "dynamic_sampling/generated_tokens": generated,
            "dynamic_sampling/uniform_share": sum(len(group) == 1 for group in groups) / len(groups),
            "rollout/acc/mean": sum(self.accuracies) / number,
            "response_length/mean": generated / number,
            "response_length/clip_ratio": sum(map(self.is_cut_off, self.completions)) / number,
            "actor/entropy": sum(logs["entropy"] for logs in self.updates) / len(self.updates),
            "actor/grad_norm": sum(logs["grad_norm"] for logs in self.updates) / len(self.updates),
            "actor/lr": self.updates[-1]["learning_rate"],
        }

    def is_cut_off(self, tokens: list[int]) -> bool:
        return self.tokenizer.eos_token_id not in tokens

    def evaluated(self, model: Any) -> dict[str, float]:
        """Accuracy, length in tokens and share of cut-off answers: means over all held-out problems and samples."""
        samples, most = self.given["evaluation_samples"], self.given["max_tokens"]
        was_training = model.training
        model.eval()
        right, answers = [], []
        for rows in batches(self.heldout, EVALUATION_BATCH // samples):
            inputs = self.tokenizer.apply_chat_template(
                [row["prompt"] for row in rows],
                add_generation_prompt=True,
                padding=True,
                return_tensors="pt",
                return_dict=True,
            ).to(model.device)
            with torch.no_grad():
                tokens = model.generate(
                    **inputs,
                    do_sample=True,
                    temperature=1.0,
                    top_p=1.0,
                    top_k=0,
                    max_new_tokens=most,
                    num_return_sequences=samples,
                    pad_token_id=self.tokenizer.pad_token_id,
                )[:, inputs["input_ids"].shape[1] :]
            texts = self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
            truths = [row["ground_truth"] for row in rows for _ in range(samples)]
            right += [is_right(text, truth) for text, truth in zip(texts, truths, strict=True)]
            answers += tokens.tolist()
        model.train(was_training)
        lengths = [length_of(tokens, self.tokenizer.eos_token_id, most) for tokens in answers]
        return {
            f"eval/sums/acc/mean@{samples}": sum(right) / len(right),
            "eval/sums/response_length/mean": sum(lengths) / len(lengths),
            "eval/sums/response_length/clip_ratio": sum(map(self.is_cut_off, answers)) / len(answers),
        }

    def write(self, row: dict[str, float]) -> None:
        print(json.dumps(row), file=self.file, flush=True)


class Trainer(trl.GRPOTrainer):
    """GRPOTrainer with a given learning rate for each step; it passes the completions to the records."""

    def __init__(self, records: Records, **settings: Any) -> None:
        self.records = records
        super().__init__(**settings)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        rates = [rate for rate in self.records.given["learning_rates"] for _ in range(self.args.steps_per_generation)]
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer or self.optimizer, lambda update: rates[min(update, len(rates) - 1)]
        )
        return self.lr_scheduler

    def _generate_single_turn(self, *arguments: Any, **named: Any) -> Any:
        found = super()._generate_single_turn(*arguments, **named)
        self.records.completions += found[0]
        return found


if __name__ == "__main__":
    main(Path(given.workdir))
