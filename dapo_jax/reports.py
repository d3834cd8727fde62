"""Host: what a step and a run report beside the numbers of their algorithms."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from dapo_jax.checkpoint import Progress
from dapo_jax.config import Config, checkpoint_dir
from dapo_jax.evaluation import mean_accuracy
from dapo_jax.models.architecture import Architecture
from dapo_jax.models.weights import weight_table
from dapo_jax.monitor.console import Value
from dapo_jax.monitor.records import flatten, read_metrics
from dapo_jax.monitor.tensorboard import histogram
from dapo_jax.parallel.devices import GIB, limits_of
from dapo_jax.parallel.memory import used_host_bytes
from dapo_jax.rollout.experience import Experience
from dapo_jax.run import Run
from dapo_jax.settings import compute_dtype


def performance_metrics(run: Run, trained: Experience | None, seconds: float) -> dict[str, float]:
    """`perf/` and `timing_s/` of a step; evaluation and saving are not part of its seconds."""
    metrics = {"perf/time_per_step": seconds, "timing_s/step": seconds, **memory_metrics(run.mesh)}
    if trained is None:
        return metrics
    prompts = np.array([len(prompt) for prompt in trained.prompts])
    lengths = trained.mask.sum(axis=-1) + prompts[:, None]
    tokens = int(lengths.sum())
    return metrics | {
        "perf/total_num_tokens": tokens,
        "perf/throughput": tokens / seconds / run.num_devices,
        "perf/forward_tflop": forward_flops(run.arch, lengths) / 1e12,
    }


def forward_flops(arch: Architecture, lengths: np.ndarray) -> float:
    """Floating-point operations of one forward pass over sequences of these lengths, with causal attention and head.

    2 for each parameter that multiplies and each token, 2 layers heads head_dim length^2 for attention. As verl, each
    sequence has its own prompt, also where a group shares one.
    """
    looked_up = 0 if arch.tie_embeddings else arch.vocab_size * arch.hidden_size
    multiplied = sum(math.prod(weight.shape) for weight in weight_table(arch) if weight.is_matrix) - looked_up
    attention = arch.num_layers * arch.num_heads * arch.head_dim * np.sum(np.square(lengths, dtype=np.float64))
    return 2 * float(multiplied * np.sum(lengths, dtype=np.float64) + attention)


def utilisation(run: Run, metrics: Mapping[str, float]) -> dict[str, float]:
    """`perf/mfu/`: the share of the training devices' peak that a step's passes reach; {} where that is not known.

    An update is three forward passes an epoch; two with adapters, whose gradients alone are computed.
    """
    config = run.config
    peak = limits_of(run.mesh.devices.flat[0]).of_dtype(compute_dtype(config, run.mesh).name).flops
    forward = metrics.get("perf/forward_tflop")
    if peak is None or forward is None:
        return {}
    passes = {
        "actor": ("update_actor", (2 if config.model.lora.rank else 3) * config.actor.ppo_epochs),
        "critic": ("update_critic", 3 * config.critic.ppo_epochs),
    }
    if metrics.get("actor/recomputed_logprobs"):
        passes["actor_infer"] = "old_log_prob", 1
    return {
        f"perf/mfu/{name}": count * forward * 1e12 / (metrics[f"timing_s/{stage}"] * run.mesh.size * peak)
        for name, (stage, count) in passes.items()
        if f"timing_s/{stage}" in metrics
    }


def memory_metrics(mesh: Mesh) -> dict[str, float]:
    """Memory in GiB: the most that a device of this process has used (where it tells), and what the host uses now."""
    stats = [device.memory_stats() or {} for device in mesh.local_devices]
    names = {"allocated": "peak_bytes_in_use", "reserved": "peak_pool_bytes"}
    found = {
        f"perf/max_memory_{name}_gb": max(stat[key] for stat in stats) / GIB
        for name, key in names.items()
        if all(key in stat for stat in stats)
    }
    used = used_host_bytes()
    return found | ({} if used is None else {"perf/cpu_memory_used_gb": used / GIB})


def experience_histograms(experience: Experience) -> dict[str, dict[str, Any]]:
    """How lengths, scores and log-probabilities of the trained responses are distributed, for TensorBoard."""
    return {
        "response_length": histogram(experience.mask.sum(axis=-1)),
        "critic/score": histogram(experience.scores["seq_reward"]),
        "rollout/logprob": histogram(experience.logprobs[experience.mask]),
    }


def sample_texts(run: Run, experience: Experience) -> list[dict[str, Any]]:
    """monitor.num_samples trained responses with their scores: a quarter each of the kinds best, worst, truncated and,
    as a fair picture, the first of the first groups ("any"), which also fill up. None stands there twice.
    """
    wanted = run.config.monitor.num_samples
    score = experience.scores["seq_reward"]
    lengths = experience.mask.sum(axis=-1)
    groups = np.arange(len(experience))
    best, worst = score.argmax(axis=1), score.argmin(axis=1)
    kinds = {
        "best": [(group, best[group]) for group in np.argsort(-score.max(axis=1), kind="stable")],
        "worst": [(group, worst[group]) for group in np.argsort(score.min(axis=1), kind="stable")],
        "truncated": np.argwhere(~experience.finished),
    }
    chosen: dict[tuple[int, int], str] = {}
    for kind, candidates in kinds.items():
        new = dict.fromkeys((int(group), int(sample)) for group, sample in candidates)
        chosen |= dict.fromkeys([place for place in new if place not in chosen][: wanted // 4], kind)
    firsts = [(int(group), 0) for group in groups if (int(group), 0) not in chosen]
    chosen |= dict.fromkeys(firsts[: wanted - len(chosen)], "any")
    return [
        {
            "kind": kind,
            "prompt": run.sampler.tokenizer.decode(experience.prompts[group], skip_special_tokens=False),
            "response": experience.texts[group][sample],
            "ground_truth": run.train_set.rows[experience.rows[group]].truth_text,
            "length": int(lengths[group, sample]),
            **{name: float(values[group, sample]) for name, values in experience.scores.items()},
        }
        for (group, sample), kind in chosen.items()
    ]


def options(config: Config) -> dict[str, Any]:
    """The value of every option by dotted key."""
    return flatten(dataclasses.asdict(config))


def results(run: Run) -> list[str]:
    """The metrics by which runs are compared: the held-out accuracy of each task set."""
    return [
        f"eval/{name}/acc/mean@{task.options.n * max(map(len, problems))}"
        for task in run.task_sets
        for name, problems in task.by_name()
    ]


def summary(run: Run, progress: Progress) -> list[tuple[str, Value]]:
    """The table at the end of a run; seconds per stage are those since it was started."""
    workdir = Path(run.config.workdir)
    accuracies = {row["step"]: mean_accuracy(row) for row in read_metrics(workdir)}
    evaluated = [step for step, accuracy in accuracies.items() if accuracy is not None and step > 0]
    problems = ", ".join(f"{len(task.prompts)} x {task.options.n}" for task in run.task_sets)
    logdir = workdir if workdir.parent == Path(".") else workdir.parent  # there a run has the name of its directory
    tensorboard = [("TensorBoard", f"tensorboard --logdir {logdir}")]
    seconds = dict(sorted(run.timers.totals.items(), key=lambda item: -item[1]))
    return [
        ("held-out accuracy before", accuracies.get(0)),
        ("held-out accuracy after", accuracies[evaluated[-1]] if evaluated else None),
        ("best", progress.best),
        ("best after step", None if progress.best is None else progress.best_step),
        ("held-out problems x samples", problems or None),
        ("tokens generated", progress.tokens_generated),
        ("tokens trained", progress.tokens_trained),
        ("groups kept", progress.groups_kept),
        ("groups dropped", progress.groups_dropped),
        ("seconds per stage", seconds),
        *(tensorboard if "tensorboard" in run.config.trainer.logger else []),
        ("checkpoints", checkpoint_dir(run.config)),
    ]
