"""Host: generation rounds until enough groups are kept (DAPO, section 3.2, algorithm 1).

The accepted batch is the first `target` kept groups in prompt order. The next step starts with the prompt after
the last accepted one, so that surplus groups are sampled again by the newer policy, and how many prompts a round
holds changes the speed but never the batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dapo_jax.dynamic_sampling.rounds import Round, filtered_counts
from dapo_jax.monitor import filter_log
from dapo_jax.rollout.experience import Experience, concatenate


@dataclass(frozen=True)
class Accepted:
    """What a training step trains on and what it took."""

    experience: Experience  # exactly `target` groups
    rounds: list[Round]
    next_prompt: int  # where the next step starts


def accumulate_groups(
    generate_round: Callable[[range], Round],
    *,
    first_prompt: int,
    target: int,
    gen_batch_size: int,
    max_num_gen_batches: int,
    step: int,
    metric: str | None,
) -> Accepted:
    """Calls `generate_round` on consecutive prompt numbers until `target` groups are kept.

    Args:
        max_num_gen_batches: exactly this many rounds may run; 0 or less = no limit.
        step, metric: for the log; no metric means no filter, and nothing to log.

    Raises:
        RuntimeError: the limit is reached; says how many groups were all right and all wrong, and the ways out.
    """
    rounds: list[Round] = []
    kept = 0
    while kept < target:
        if len(rounds) == max_num_gen_batches > 0:
            raise RuntimeError(_limit_message(rounds, kept, target, max_num_gen_batches))
        start = first_prompt + len(rounds) * gen_batch_size
        rounds.append(generate_round(range(start, start + gen_batch_size)))
        kept += int(rounds[-1].keep.sum())
        if metric is not None:
            _log(rounds, kept, target, step, metric, last=len(rounds) == max_num_gen_batches)
    experience = concatenate([round_.experience.select(np.flatnonzero(round_.keep)) for round_ in rounds])
    experience = experience.select(np.arange(target))
    if metric is not None:
        filter_log.log_enough(experience.finished.size)
    return Accepted(experience, rounds, int(experience.numbers[-1]) + 1)


def sampling_metrics(accepted: Accepted) -> dict[str, float]:
    """`train/` and `dynamic_sampling/` metrics of a step, over all groups that were evaluated."""
    rounds, target = accepted.rounds, len(accepted.experience)
    keep = np.concatenate([round_.keep for round_ in rounds])
    std = np.concatenate([round_.metric_std for round_ in rounds])
    kept, evaluated = int(keep.sum()), len(keep)
    generated = sum(round_.experience.num_tokens for round_ in rounds)
    trained = accepted.experience.num_tokens
    numbers = np.concatenate([round_.experience.numbers for round_ in rounds])
    return {
        "train/num_gen_batches": len(rounds),
        "train/filter_rate": 1 - kept / evaluated,
        "train/mean_metric_std": float(std.mean()),
        "train/num_kept_prompts": kept,
        "dynamic_sampling/num_gen_batches": len(rounds),
        "dynamic_sampling/num_accumulated_prompts": kept,
        "dynamic_sampling/target_prompt_num": target,
        "dynamic_sampling/num_evaluated_prompts": evaluated,
        **{f"dynamic_sampling/filtered_{name}": count for name, count in filtered_counts(rounds).items()},
        "dynamic_sampling/num_requeued": int(np.sum(numbers >= accepted.next_prompt)),
        "dynamic_sampling/generated_tokens": generated,
        "dynamic_sampling/trained_tokens": trained,
        "dynamic_sampling/overgen_ratio": generated / max(trained, 1),
    }


def _log(rounds: Sequence[Round], kept: int, target: int, step: int, metric: str, *, last: bool) -> None:
    newest = rounds[-1]
    filter_log.log_round(
        step=step,
        round_number=len(rounds),
        num_prompts=len(newest.keep),
        num_samples=newest.experience.finished.shape[1],
        metric=metric,
        num_kept=int(newest.keep.sum()),
        mean_std=float(newest.metric_std.mean()),
        num_accumulated=kept,
        target=target,
        last=last,
    )


def _limit_message(rounds: Sequence[Round], kept: int, target: int, limit: int) -> str:
    counts = filtered_counts(rounds)
    evaluated = sum(len(round_.keep) for round_ in rounds)
    return (
        f"only {kept} of data.train_batch_size={target} groups kept after {limit} generation rounds "
        f"(algorithm.filter_groups.max_num_gen_batches): of {evaluated} groups {counts['all_correct']} were all "
        f"right, {counts['all_wrong']} all wrong, {counts['other']} uniform otherwise. Three ways out: raise "
        "max_num_gen_batches, lower data.train_batch_size, or change the difficulty of the data "
        "(or raise rollout.n), so that more groups hold both right and wrong answers"
    )
