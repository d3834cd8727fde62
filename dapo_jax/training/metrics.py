"""Host: the metrics and histograms of one training step."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from dapo_jax.algorithms.arguments import needs
from dapo_jax.config.sections import DataConfig, ModelConfig
from dapo_jax.data.containers import Batch
from dapo_jax.data.experience import Collected, Experience, Outcomes, comparable
from dapo_jax.data.prompt_files import source_names
from dapo_jax.data.prompts import PromptOrder
from dapo_jax.data.work import efficiencies
from dapo_jax.dynamic_sampling.accepted import SOLVED, Accepted
from dapo_jax.dynamic_sampling.prompt_stream import curriculum_metrics
from dapo_jax.dynamic_sampling.rounds import filtered_counts
from dapo_jax.learner.learner import Batching
from dapo_jax.learner.trained_networks import Network
from dapo_jax.learner.update import sequence_lengths, tokens_of_devices
from dapo_jax.models.architecture import Architecture
from dapo_jax.models.flops import token_flops
from dapo_jax.monitor import statistics
from dapo_jax.monitor.tensorboard import Histograms, histogram
from dapo_jax.parallel.devices import GIB, limits_of
from dapo_jax.parallel.memory import used_host_bytes
from dapo_jax.run.passes import compute_dtype
from dapo_jax.run.problems import Problems
from dapo_jax.run.segments import Segments

GREEDY = "greedy tokens"  # sampled for the update, among its metrics


def collect(accepted: Accepted, data: DataConfig, problems: Problems) -> Collected:
    """The groups to train on, with the metrics of all that were sampled for them."""
    order = problems.order
    metrics = sampling_metrics(accepted) | experience_metrics(accepted, data, order)
    metrics |= curriculum_metrics(data.curriculum, accepted.state.history)
    metrics |= mixture_metrics(accepted, data, order)
    metrics |= metrics_of_environments(accepted, [row.task for row in problems.train_set.rows])
    return Collected(
        accepted.experience,
        metrics,
        num_kept=sum(int(round_.keep.sum()) for round_ in accepted.rounds),
        num_evaluated=sum(len(round_.keep) for round_ in accepted.rounds),
        solved=accepted.outcome == SOLVED,
    )


def experience_metrics(accepted: Accepted, data: DataConfig, order: PromptOrder) -> dict[str, float]:
    """What was sampled, and rewards and lengths of what is trained on, each if there is any."""
    trained, sampled = accepted.experience, [round_.outcomes for round_ in accepted.rounds]
    metrics = {
        "data/prompts_consumed": accepted.state.next_prompt,
        "data/epoch": order.epoch(accepted.state.next_prompt),
        "rollout/finished_task_count": sum(len(part.numbers) for part in sampled),
        "reward/num_errors": sum(int(part.failed.sum()) for part in sampled),  # not those of carried groups
        "reward/num_missing": sum(int((~part.known).sum()) for part in sampled),
        "experience_pipeline/experience_count": 0 if trained is None else int(trained.known.sum()),
        "experience_pipeline/filtered_count": sum(
            int((~round_.keep).sum()) * round_.outcomes.lengths.shape[1] for round_ in accepted.rounds
        ),
    }
    metrics |= efficiencies([*(part.work for part in sampled), accepted.sampled.work])
    if sampled:
        metrics |= _sampled_metrics(sampled)
        metrics["reward/error_share"] = metrics["reward/num_errors"] / sum(part.failed.size for part in sampled)
    return metrics if trained is None else metrics | _trained_metrics(trained, data)


def mixture_metrics(accepted: Accepted, data: DataConfig, order: PromptOrder) -> dict[str, float]:
    """`mixture/` metrics of each file of data.mixture, over all groups that were sampled."""
    metrics: dict[str, float] = {}
    for file, name in enumerate(source_names(data.train_files) if data.mixture else ()):
        metrics |= _part_metrics(f"mixture/{name}", accepted, order.files(np.arange(sum(order.sizes))) == file)
        metrics[f"mixture/{name}/epoch"] = order.counts(accepted.state.next_prompt)[file] / order.sizes[file]
    return metrics


def metrics_of_environments(accepted: Accepted, names: Sequence[str]) -> dict[str, float]:
    """`environment/NAME/` metrics of each of several environments, over all groups that were sampled.

    Args:
        names: of the environment of each training problem; "" if there is one alone, or none.
    """
    of_rows, metrics = np.array(names), dict[str, float]()
    for name in sorted({*names} - {""}):
        metrics |= _part_metrics(f"environment/{name}", accepted, of_rows == name, "num_turns")
    return metrics


def _part_metrics(prefix: str, accepted: Accepted, chosen: np.ndarray, *further: str) -> dict[str, float]:
    """Groups of the `chosen` training problems [N], the share of them that were kept, and means of their scores."""
    mine = [(part, chosen[part.outcomes.rows]) for part in accepted.rounds]
    found = {
        name: [part.outcomes.score(name)[own].ravel() for part, own in mine] for name in ("acc", "score", *further)
    }
    found["kept_share"] = [part.keep[own] for part, own in mine]
    metrics: dict[str, float] = {f"{prefix}/num_prompts": sum(map(len, found["kept_share"]))}
    for measure, parts in found.items():
        values = np.concatenate([*parts, np.zeros(0)])
        if (values := values[~np.isnan(values)]).size:
            metrics[f"{prefix}/{measure}"] = float(np.mean(values))
    return metrics


def _sampled_metrics(sampled: Sequence[Outcomes]) -> dict[str, float]:
    """Of all groups that were sampled, also those that the filter drops."""
    names = sorted({name for part in sampled for name in part.scores})
    scores = {name: np.concatenate([part.score(name) for part in sampled]) for name in names}
    compared = scores.get("acc", scores["seq_reward"])
    known = np.concatenate([part.known for part in sampled])
    metrics = {
        **statistics.score_metrics(scores),
        "reward/length_correlation": statistics.length_correlation(
            scores["score"],
            np.concatenate([part.lengths for part in sampled]),
            scores["acc"] > 0 if "acc" in scores else np.zeros(compared.shape, bool),
            np.concatenate([~part.failed for part in sampled]) & ~np.isnan(scores["score"]),
        ),
    }
    if known.any():
        metrics["reward/unfiltered_mean"] = float(np.mean(scores["seq_reward"][known]))
    # Not of one sample, which has nothing to be equal to, nor of responses that nothing has scored.
    several = known.shape[1] > 1 and not scores.keys().isdisjoint(("acc", "reward_model"))
    compared = compared[comparable(known)]
    if several and len(compared):
        uniform = np.nanmax(compared, axis=1) == np.nanmin(compared, axis=1)
        metrics["dynamic_sampling/uniform_share"] = float(np.mean(uniform))
    return metrics


def _trained_metrics(trained: Experience, data: DataConfig) -> dict[str, float]:
    lengths, prompt_lengths = trained.lengths, np.array([len(prompt) for prompt in trained.prompts])
    known = trained.known
    return {
        **statistics.spread("critic/score", trained.scores["seq_reward"][known]),
        **statistics.spread("critic/rewards", trained.final_rewards[known]),
        **statistics.length_metrics("response", lengths[known], data.max_response_length, trained.mask.sum(-1)[known]),
        **statistics.length_percentiles("response", lengths[known]),
        "response_length/within_prompts": statistics.share_within_prompts(np.where(known, lengths, np.nan)),
        **statistics.length_metrics("prompt", prompt_lengths, data.max_prompt_length),
        **statistics.length_percentiles("prompt", prompt_lengths),
        **statistics.spread("sample/model_version", trained.versions),
        "sample/task_count": len(np.unique(trained.rows)),
        **statistics.group_reward_metrics(trained.final_rewards),
    }


def sampling_metrics(accepted: Accepted) -> dict[str, float]:
    """`train/` and `dynamic_sampling/` metrics of a step, over all groups that were evaluated in it."""
    rounds = accepted.rounds
    keep = np.concatenate([round_.keep for round_ in rounds] or [np.zeros(0, bool)])
    std = np.concatenate([round_.metric_std for round_ in rounds] or [np.zeros(0)])
    kept = int(keep.sum())
    generated = accepted.sampled.tokens
    batch = accepted.experience
    trained = 0 if batch is None else int(batch.lengths[batch.known].sum())
    # A step that trains on carried groups alone has sampled nothing, and has no rates.
    rates = {"train/filter_rate": float(np.mean(~keep)), "train/mean_metric_std": float(std.mean())} if rounds else {}
    return rates | {
        "train/num_gen_batches": accepted.num_rounds,
        "train/num_kept_prompts": kept,
        "dynamic_sampling/num_gen_batches": accepted.num_rounds,
        "dynamic_sampling/num_accumulated_prompts": accepted.carried_in + kept,
        "dynamic_sampling/target_prompt_num": accepted.target,
        "dynamic_sampling/num_evaluated_prompts": len(keep),
        **{f"dynamic_sampling/filtered_{name}": count for name, count in filtered_counts(rounds).items()},
        "dynamic_sampling/num_requeued": accepted.num_requeued,
        "dynamic_sampling/num_discarded_valid": accepted.num_discarded,
        "dynamic_sampling/num_carried_in": accepted.carried_in,
        "dynamic_sampling/num_carried_out": len(accepted.state.carried) if accepted.state.carried is not None else 0,
        "dynamic_sampling/num_aborted": accepted.sampled.aborted,
        "dynamic_sampling/num_begun": len(accepted.state.begun or ()),
        "dynamic_sampling/num_stale": accepted.num_stale,
        "dynamic_sampling/num_skipped_uniform": accepted.num_skipped,
        "dynamic_sampling/partial_step": float(accepted.outcome != "full"),
        "dynamic_sampling/keep_rate_ema": accepted.state.keep_rate,
        "dynamic_sampling/effective_limit": accepted.limit if math.isfinite(accepted.limit) else 0,
        "dynamic_sampling/generated_tokens": generated,
        "dynamic_sampling/trained_tokens": trained,
        "dynamic_sampling/overgen_ratio": generated / max(trained, 1),
        "dynamic_sampling/accepted_len_over_finished_kept_len": _length_ratio(accepted, [one.keep for one in rounds]),
        "dynamic_sampling/accepted_len_over_judged_len": _length_ratio(
            accepted, [np.ones_like(one.keep) for one in rounds]
        ),
    }


def with_greedy(metrics: Mapping[str, float], tokens: float) -> dict[str, float]:
    """The metrics of a step's groups with the `tokens` of greedy responses among those generated."""
    generated = metrics["dynamic_sampling/generated_tokens"] + tokens
    ratio = generated / max(metrics["dynamic_sampling/trained_tokens"], 1)
    return {**metrics, "dynamic_sampling/generated_tokens": generated, "dynamic_sampling/overgen_ratio": ratio}


def _length_ratio(accepted: Accepted, groups: Sequence[np.ndarray]) -> float:
    """Mean response length of the accepted groups over that of these groups [Q] of each round."""
    outcomes = [round_.outcomes for round_ in accepted.rounds]
    parts = [one.lengths[chosen[:, None] & one.known] for one, chosen in zip(outcomes, groups, strict=True)]
    lengths = np.concatenate([np.zeros(0), *parts])
    if not len(lengths) or accepted.experience is None:
        return 1.0
    known = accepted.experience.known
    return float(accepted.experience.lengths[known].mean()) / max(float(lengths.mean()), 1e-8)


def performance_metrics(
    trained: Experience | None, seconds: float, *, arch: Architecture, meshes: Sequence[Mesh], num_devices: int
) -> dict[str, float]:
    """`perf/` and `timing_s/` of a step; evaluation and saving are not part of its seconds.

    Args:
        meshes: that train and sample.
        num_devices: of them all.
    """
    metrics = {"perf/time_per_step": seconds, "timing_s/step": seconds, **memory_metrics(*meshes)}
    if trained is None:
        return metrics
    prompts = np.array([len(prompt) for prompt in trained.prompts])
    lengths = np.where(trained.known, trained.mask.sum(axis=-1) + prompts[:, None], 0)
    tokens = int(lengths.sum())
    return metrics | {
        "perf/total_num_tokens": tokens,
        "perf/throughput": tokens / seconds / num_devices,
        "perf/forward_tflop": forward_flops(arch, lengths) / 1e12,
    }


def forward_flops(arch: Architecture, lengths: np.ndarray) -> float:
    """Floating-point operations of one forward pass over sequences of these lengths, with causal attention and head.

    length^2 / 2 pairs of a query and a key, without those beyond a layer's window. As verl, each sequence has its own
    prompt, also where a group shares one.
    """
    flops = token_flops(arch)

    def half_square(window: int | None) -> np.ndarray:
        beyond = 0 if window is None else np.maximum(lengths - window, 0)
        return (np.square(lengths, dtype=np.float64) - np.square(beyond, dtype=np.float64)) / 2

    pairs = np.sum(flops.mean(half_square))
    return float((flops.layers + flops.head) * np.sum(lengths, dtype=np.float64) + flops.pair * pairs)


def utilisation(
    model: ModelConfig,
    arch: Architecture,
    networks: Mapping[str, Network],
    mesh: Mesh,
    metrics: Mapping[str, float],
    *,
    estimator: Callable[..., Any],
    ahead: bool = False,
) -> dict[str, float]:
    """`perf/mfu/`: the share of the training devices' peak that a step's passes reach; {} where that is not known.

    An update is three forward passes an epoch; two with adapters, whose gradients alone are computed. A critic's
    have no scores of the vocabulary.

    Args:
        estimator: of advantages, which may need a second pass over the policy: with hints, which are not counted.
        ahead: as in `time_metrics`.
    """
    peak = limits_of(mesh.devices.flat[0]).of_dtype(compute_dtype(model, mesh).name).flops
    forward = metrics.get("perf/forward_tflop")
    if peak is None or forward is None:
        return {}
    epochs = {name: network.options.ppo_epochs for name, network in networks.items()}
    times = {name: (2 if name == "actor" and model.lora.rank else 3) * count for name, count in epochs.items()}
    passes = {name: (f"update_{name}", count) for name, count in times.items()}
    if metrics.get("actor/recomputed_logprobs"):
        passes["actor_infer"] = "old_log_prob", 1 + needs(estimator, "hint_logprobs")
    work = dict.fromkeys(passes, forward * 1e12)
    work["critic"] = forward * 1e12 - token_flops(arch).head * metrics["perf/total_num_tokens"]
    return {
        f"perf/mfu/{name}": count * work[name] / (metrics[f"timing_s/{stage}"] * mesh.size * peak)
        for name, (stage, count) in passes.items()
        if f"timing_s/{stage}" in metrics and not (ahead and stage in statistics.AHEAD_STAGES)
    }


def memory_metrics(*meshes: Mesh) -> dict[str, float]:
    """GiB of memory: the peak of this process' devices (if they report it), and what the host uses now."""
    stats = [device.memory_stats() or {} for mesh in meshes for device in mesh.local_devices]
    names = {"allocated": "peak_bytes_in_use", "reserved": "peak_pool_bytes"}
    found = {
        f"perf/max_memory_{name}_gb": max(stat[key] for stat in stats) / GIB
        for name, key in names.items()
        if all(key in stat for stat in stats)
    }
    used = used_host_bytes()
    return found | ({} if used is None else {"perf/cpu_memory_used_gb": used / GIB})


def batch_records(
    batch: Batch, experience: Experience, batching: Batching, segments: Segments | None, step: int
) -> tuple[dict[str, float], Histograms]:
    """Metrics and histograms of a batch of `experience`: the age of its policies, its shares of the devices.

    Args:
        segments: of partial rollouts, whose tokens may be older than the last of their response.
    """
    shares = tokens_of_devices(batch, batching.trained["actor"], batching.micro_batches["actor"])
    metrics = statistics.spread("sample/staleness", step - 1 - experience.versions)
    metrics |= statistics.balance_metrics(sequence_lengths(batch)[: experience.finished.size], shares)
    histograms = {"critic/advantages": histogram(batch.advantages[batch.loss_mask])}
    if segments is not None:
        ages = step - 1 - segments.token_versions(experience)[experience.policy_mask & experience.known[:, :, None]]
        metrics |= statistics.spread("sample/token_staleness", ages)
        histograms["sample/token_staleness"] = histogram(ages)
    return metrics, histograms
