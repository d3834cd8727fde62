"""A work directory as a run leaves it, with numbers that are easy to add up."""

import dataclasses
import json
from pathlib import Path

from dapo_jax.config.sections import Config
from dapo_jax.config.values import with_values
from dapo_jax.monitor.recipe import Recipe, write_config, write_recipe
from dapo_jax.monitor.records import to_json_line

ENVIRONMENT = {"versions": {"python": "3.12.1", "jax": "0.11.0"}, "devices": "4 x NVIDIA H100", "processes": 2}
ENVIRONMENT["host"] = "EPYC, 64 cores"
# The metrics of every training step; row_of adds those that change.
STEADY = """
    train/filter_rate=0.4 dynamic_sampling/num_gen_batches=2 dynamic_sampling/num_evaluated_prompts=20
    dynamic_sampling/filtered_all_correct=3 dynamic_sampling/filtered_all_wrong=5 dynamic_sampling/filtered_other=0
    dynamic_sampling/num_requeued=2 dynamic_sampling/num_carried_out=1 dynamic_sampling/num_discarded_valid=0
    dynamic_sampling/partial_step=0 dynamic_sampling/generated_tokens=600 dynamic_sampling/trained_tokens=240
    actor/lr=1e-6 perf/decode_efficiency=0.75 timing_s/step=10 timing_s/gen=6 timing_s/update_actor=3 alarm/kl_jump=0
"""


def row_of(step: int) -> dict[str, float]:
    """The metrics of a training step."""
    steady = {name: float(value) for name, value in (pair.split("=") for pair in STEADY.split())}
    changing = {"rollout/acc/mean": step / 100, "actor/entropy": 2 - step / 10, "actor/ppo_kl": 1e-9 * step}
    return {"step": step, **steady, **changing, "alarm/truncation": float(step in (2, 3))}


def evaluation(accuracy: float) -> dict[str, float]:
    return {"eval/gsm8k/acc/mean@4": accuracy, "timing_s/testing": 5, "alarm/heldout_drop": 0}


def sample(kind: str = "any", prompt: str = "1 + 1 =", response: str = "2", acc: float = 1.0) -> dict:
    verdict = {"ground_truth": "2", "length": 3, "score": acc, "acc": acc}
    return {"kind": kind, "prompt": prompt, "response": response, **verdict}


def write_run(
    folder: Path,
    *,
    steps: int = 4,
    total: int = 4,
    options: dict | None = None,
    recipe: Recipe | None = None,
    samples: dict[int, list[dict]] | None = None,
    log: str = "",
) -> Path:
    """A run that has finished `steps` steps, evaluated before the first and after each; -1: nothing at all yet."""
    config = with_values(Config(), {"trainer.total_training_steps": total, "workdir": str(folder), **(options or {})})
    write_config(folder, dataclasses.asdict(config))
    write_recipe(folder, recipe)
    (folder / "environment.json").write_text(json.dumps(ENVIRONMENT))
    (folder / "train.log").write_text(log)
    rows = [{"step": 0, **evaluation(0.1)}, *(row_of(step) | evaluation(step / 5) for step in range(1, steps + 1))]
    (folder / "metrics.jsonl").write_text("".join(map(to_json_line, rows)) if steps >= 0 else "")
    (folder / "samples").mkdir(exist_ok=True)
    for step, found in (samples or {}).items():
        path = folder / "samples" / f"step_{step:06d}.jsonl"
        path.write_text("".join(json.dumps(one) + "\n" for one in found))
    return folder
