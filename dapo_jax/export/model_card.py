"""Host: README.md of an exported model, as the Hugging Face hub shows it: what it is, how it was trained, metrics."""

from pathlib import Path
from typing import Any

import yaml

from dapo_jax.config.sections import Config
from dapo_jax.config.values import flat
from dapo_jax.hub.names import model_name
from dapo_jax.monitor.records import read_metrics
from dapo_jax.monitor.statistics import HELD_OUT
from dapo_jax.run.base_models import first_model
from dapo_jax.run.other_runs import RANDOM

TAGS = ("dapo", "reinforcement-learning", "dapo_jax")
OPTIONS = (  # that say how it was trained; none is a path on this machine
    *(
        "algorithm.adv_estimator",
        "algorithm.filter_groups.enable",
        "actor.policy_loss.loss_mode",
        "actor.loss_agg_mode",
    ),
    *("actor.clip_ratio_low", "actor.clip_ratio_high", "actor.optim.lr", "model.lora.rank"),
    *("data.train_batch_size", "rollout.n", "actor.ppo_mini_batch_size", "data.max_response_length", "seed"),
)


def model_card(config: Config, step: int, *, adapter: bool) -> str:
    """The text of README.md for the policy after training step `step`.

    Args:
        adapter: it goes with PEFT's adapters instead of a whole model.
    """
    model = first_model(config)
    name, values = model_name(model), flat(config)
    head: dict[str, Any] = {"library_name": "peft" if adapter else "transformers", "pipeline_tag": "text-generation"}
    if name is not None:
        head["base_model"] = name.repository
    base = name.repository if name else "a random model" if model == RANDOM else Path(model).name
    lines = [
        "---",
        yaml.safe_dump(head | {"tags": [*TAGS]}, sort_keys=False).rstrip(),
        "---",
        "",
        f"# {Path(config.workdir).name}",
        "",
        f"{'Adapters for ' * adapter}{base} after {step} training steps of DAPO (arXiv:2503.14476) by dapo_jax.",
        "",
        *_table("option", [(key, str(values[key])) for key in OPTIONS]),
    ]
    measured = _measured(config.workdir, step)
    if measured:
        lines += ["", *_table("metric at this step", [(key, f"{value:.4f}") for key, value in measured.items()])]
    return "\n".join(lines) + "\n"


def recipe(config: Config) -> str:
    """The algorithm in a few words."""
    loss, groups = config.actor.policy_loss.loss_mode, config.algorithm.filter_groups
    return f"{config.algorithm.adv_estimator}, loss {loss}, {'with' if groups.enable else 'without'} dynamic sampling"


def _table(title: str, rows: list[tuple[str, str]]) -> list[str]:
    return [f"| {title} | |", "| --- | --- |", *(f"| `{key}` | {value} |" for key, value in rows)]


def _measured(workdir: str, step: int) -> dict[str, float]:
    """Held-out accuracies of the step in the run's metrics; {} without any."""
    try:
        rows = read_metrics(workdir)
    except (OSError, RuntimeError):  # moved, in a bucket, or damaged: the export does not depend on it
        return {}
    row = next((row for row in reversed(rows) if row.get("step") == step), {})
    return {key: value for key, value in row.items() if HELD_OUT.fullmatch(key)}
