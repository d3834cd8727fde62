"""DAPO here beside TRL's GRPOTrainer: one task, model, batch, learning rate and number of updates.

    python scripts/compare_trl.py --trl TORCH_ENV/bin/python [--seeds 0] [--output docs/results]

configs/sums.py states the task and the settings; the trainer of TRL is given the same ones: loss_type "dapo", clip-
higher, truncated completions left out, its soft overlong punishment, as many updates a generation, the same learning
rate at each step. What it does not have is dynamic sampling, so each of its steps samples the batch alone; a second arm
here has none either. It loads the same GGUF file, samples with transformers' generate (not vLLM), and its accuracy is
measured on the same held-out problems, two samples each at temperature 1. It mixes the rows of all groups before it
divides them into updates; here an update has whole groups. Runs are kept and reported as by run_ablation.py, but never
taken from another comparison, since seconds count: those of training steps, without loading, evaluation and
checkpoints; compilation here and warm-up there are in them.

TORCH_ENV: pip install torch trl gguf pyarrow.
"""

import argparse
import itertools
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from comparisons import NO_FILTER, Comparison

ROOT = Path(__file__).resolve().parents[1]
CONFIG = "configs/sums.py"
OURS = {"dapo_jax": {}, "dapo_jax, no filter": NO_FILTER}
EVALUATION_BATCH = 64  # responses


def main(arguments: Sequence[str] | None = None) -> None:
    from comparison_report import report
    from finished_runs import finished_runs, reported_runs
    from run_ablation import command_options, folder_of, train

    from dapo_jax.command_line import read_config

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", type=Path, required=True, help="Python interpreter that has torch, trl and gguf")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "compare_trl", help="folder of the workdirs")
    parser.add_argument("--output", type=Path, help="folder of table and figures; none are written unless given")
    given, options = parser.parse_known_args(arguments)
    comparison = Comparison(CONFIG, OURS)
    configured = {arm: command_options(comparison, arm, options) for arm in OURS}
    folders = {arm: folder_of(given.runs, options_of_arm) for arm, options_of_arm in configured.items()}
    config = read_config(["compare_trl", *configured["dapo_jax"]])
    theirs = folders["dapo_jax"].with_name(f"{folders['dapo_jax'].name}_trl")
    reports = [given.output / "compare_trl.json"] if given.output else []
    reported = reported_runs(reports)
    for seed in given.seeds:
        for arm, folder in folders.items():
            if (folder.name, seed) not in reported:
                train(arm, configured[arm], folder, seed)
        if (theirs.name, seed) not in reported:
            train_with_trl(given.trl, config, theirs / f"seed{seed}", seed)
    command = " ".join(["python scripts/compare_trl.py --trl TORCH_ENV/bin/python", *options])
    runs = finished_runs({**folders, "TRL": theirs}, reports)
    report("compare_trl", runs, given.output, {"command": command, "config": CONFIG})


def train_with_trl(python: Path, config: Any, workdir: Path, seed: int) -> None:
    """Runs TRL's side in its environment to its end, unless that is done."""
    from finished_runs import is_finished, mark_finished

    if is_finished(workdir):
        return
    print(f"TRL, seed {seed}", flush=True)
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / "settings.json").write_text(json.dumps(settings_of(config, seed)))
    with open(workdir / "output.txt", "w") as output:
        command = [str(python), __file__, "--child", str(workdir)]
        code = subprocess.run(command, stdout=output, stderr=output, cwd=ROOT).returncode
    if code:
        sys.exit(f"TRL's run failed with exit code {code}, see {workdir / 'output.txt'}")
    mark_finished(workdir, json.loads((workdir / "versions.json").read_text()))


def settings_of(config: Any, seed: int) -> dict[str, Any]:
    """What TRL's side is told: numbers and strings of our config."""
    from dapo_jax.learning import learning_rate_of

    actor, optim, steps = config.actor, config.actor.optim, config.trainer.total_training_steps
    updates = config.data.train_batch_size // actor.ppo_mini_batch_size
    return {
        "seed": seed,
        "model": config.model.path,
        "train_files": list(config.data.train_files),
        "val_files": list(config.data.val_files),
        "steps": steps,
        "updates_per_step": updates,
        "rows_per_update": actor.ppo_mini_batch_size * config.rollout.n,
        "samples": config.rollout.n,
        "max_tokens": config.data.max_response_length,
        "overlong_buffer": config.reward.overlong_buffer.len if config.reward.overlong_buffer.enable else 0,
        "mask_truncated": config.algorithm.overlong_filtering,
        "clip_low": actor.clip_ratio_low,
        "clip_high": actor.clip_ratio_high,
        "learning_rates": [learning_rate_of(config, "actor", 1 + done) for done in range(steps)],
        "betas": list(optim.betas),
        "weight_decay": optim.weight_decay,
        "grad_clip": actor.grad_clip,
        "test_freq": config.trainer.test_freq,
        "evaluation_samples": config.evaluate.n,
    }


def child(workdir: Path) -> None:
    """Trains with TRL, in its environment, and writes metrics.jsonl under our names."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.path.insert(0, str(ROOT))
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]
    import trl  # pyright: ignore[reportMissingImports]
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from trl.rewards import get_soft_overlong_punishment  # pyright: ignore[reportMissingImports]

    given = json.loads((workdir / "settings.json").read_text())
    versions = {
        "trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__,
        "python": platform.python_version(),
    }  # fmt: skip
    (workdir / "versions.json").write_text(json.dumps(versions))
    folder, file = os.path.split(given["model"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file, padding_side="left")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    model = transformers.AutoModelForCausalLM.from_config(loaded.config, dtype=torch.float32)  # of plain weights
    model.load_state_dict(loaded.state_dict())
    del loaded
    train, heldout = rows_of(given["train_files"]), rows_of(given["val_files"])
    updates = given["updates_per_step"]
    config = trl.GRPOConfig(
        output_dir=str(workdir / "trl"), seed=given["seed"], use_cpu=not torch.cuda.is_available(), bf16=False,
        per_device_train_batch_size=given["rows_per_update"], gradient_accumulation_steps=1,
        steps_per_generation=updates, max_steps=given["steps"] * updates, num_generations=given["samples"],
        max_completion_length=given["max_tokens"], temperature=1.0, top_p=1.0, top_k=0, loss_type="dapo",
        epsilon=given["clip_low"], epsilon_high=given["clip_high"], beta=0.0,
        mask_truncated_completions=given["mask_truncated"], learning_rate=1.0,  # times that of the step
        adam_beta1=given["betas"][0], adam_beta2=given["betas"][1],
        weight_decay=given["weight_decay"], max_grad_norm=given["grad_clip"], gradient_checkpointing=False,
        logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    rates = [rate for rate in given["learning_rates"] for _ in range(updates)]  # of each update
    accuracies: list[float] = []  # of the step that is going on

    class Trainer(trl.GRPOTrainer):
        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                optimizer or self.optimizer, lambda update: rates[min(update, len(rates) - 1)]
            )
            return self.lr_scheduler

    def accuracy(completions: list[list[dict[str, str]]], ground_truth: list[str], **_: Any) -> list[float]:
        found = [is_right(turns[0]["content"], truth) for turns, truth in zip(completions, ground_truth, strict=True)]
        accuracies.extend(found)
        return found

    rewards: list[Any] = [accuracy]
    if given["overlong_buffer"]:
        rewards.append(get_soft_overlong_punishment(given["max_tokens"], given["overlong_buffer"]))
    trainer = Trainer(
        model=model, reward_funcs=rewards, args=config, processing_class=tokenizer,
        train_dataset=Dataset.from_list(train),
    )  # fmt: skip
    generate, lengths = trainer._generate_single_turn, []

    def counted(*rest: Any, **named: Any) -> Any:
        found = generate(*rest, **named)
        lengths.extend(map(len, found[0]))
        return found

    trainer._generate_single_turn = counted
    seconds, of_updates = [0.0, 0.0], []  # of the step, and when the update began; what each update logs

    def evaluated() -> dict[str, float]:
        return {f"eval/sums/{name}": value for name, value in measure(trainer.model, tokenizer, heldout, given).items()}

    def uniform_share() -> float:
        samples = given["samples"]
        groups = [accuracies[start : start + samples] for start in range(0, len(accuracies), samples)]
        return sum(len(set(group)) == 1 for group in groups) / len(groups)

    def mean_of_updates(name: str) -> float:
        return sum(logs[name] for logs in of_updates) / updates

    def write(row: dict[str, float]) -> None:
        with open(workdir / "metrics.jsonl", "a") as records:
            records.write(json.dumps(row) + "\n")

    class Records(transformers.TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            seconds[1] = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seconds[0] += time.perf_counter() - seconds[1]

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
            if logs is None or "entropy" not in logs:
                return
            of_updates.append(logs)
            if state.global_step % updates:
                return
            step = state.global_step // updates
            row = {
                "step": step, "dynamic_sampling/generated_tokens": sum(lengths), "timing_s/step": seconds[0],
                "rollout/acc/mean": sum(accuracies) / len(accuracies),
                "dynamic_sampling/uniform_share": uniform_share(),
                "actor/entropy": mean_of_updates("entropy"), "actor/grad_norm": mean_of_updates("grad_norm"),
                "response_length/mean": sum(lengths) / len(lengths), "actor/lr": logs["learning_rate"],
                "response_length/clip_ratio": sum(n == given["max_tokens"] for n in lengths) / len(lengths),
            }  # fmt: skip
            if step % given["test_freq"] == 0 or step == given["steps"]:
                row |= evaluated()
            write(row)
            seconds[0] = 0.0
            accuracies.clear()
            lengths.clear()
            of_updates.clear()

    (workdir / "metrics.jsonl").unlink(missing_ok=True)
    write({"step": 0, **evaluated()})
    trainer.add_callback(Records())
    trainer.train()


def rows_of(files: Sequence[str]) -> list[dict[str, Any]]:
    """Chats and answers of prompt files; an empty system message keeps the template from adding its own."""
    import pyarrow.parquet

    rows = itertools.chain.from_iterable(pyarrow.parquet.read_table(file).to_pylist() for file in files)
    system = {"role": "system", "content": ""}
    return [
        {"prompt": [system, *row["prompt"]], "ground_truth": row["reward_model"]["ground_truth"]} for row in rows
    ]


def is_right(completion: str, ground_truth: str) -> float:
    """The reward of data source "arithmetic", by the same function."""
    from dapo_jax.rewards.arithmetic import score

    return score("arithmetic", completion, ground_truth, {})["score"]


def measure(model: Any, tokenizer: Any, rows: list[dict[str, Any]], given: dict[str, Any]) -> dict[str, float]:
    """Accuracy, length in tokens and share of cut-off answers: means over all held-out problems and samples."""
    import torch  # pyright: ignore[reportMissingImports]

    was_training = model.training
    model.eval()
    right, lengths = [], []
    for batch in batches(rows, EVALUATION_BATCH // given["evaluation_samples"]):
        inputs = tokenizer.apply_chat_template(
            [row["prompt"] for row in batch], add_generation_prompt=True, padding=True, return_tensors="pt",
            return_dict=True,
        ).to(model.device)  # fmt: skip
        with torch.no_grad():
            tokens = model.generate(
                **inputs, do_sample=True, temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=given["max_tokens"],
                num_return_sequences=given["evaluation_samples"], pad_token_id=tokenizer.pad_token_id,
            )[:, inputs["input_ids"].shape[1] :]  # fmt: skip
        texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
        truths = [row["ground_truth"] for row in batch for _ in range(given["evaluation_samples"])]
        right += [is_right(text, truth) for text, truth in zip(texts, truths, strict=True)]
        lengths += [length_of(row, tokenizer.eos_token_id, given["max_tokens"]) for row in tokens.tolist()]
    model.train(was_training)
    return {
        f"acc/mean@{given['evaluation_samples']}": sum(right) / len(right),
        "response_length/mean": sum(lengths) / len(lengths),
        "response_length/clip_ratio": sum(length == given["max_tokens"] for length in lengths) / len(lengths),
    }


def length_of(tokens: Sequence[int], eos: int, most: int) -> int:
    """Tokens of a completion with its end; `most` where it has none."""
    return tokens.index(eos) + 1 if eos in tokens else most


def batches(rows: list[dict[str, Any]], size: int) -> Iterator[list[dict[str, Any]]]:
    """`size` rows at a time."""
    return (rows[start : start + size] for start in range(0, len(rows), size))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(Path(sys.argv[2]))
    else:
        main()
