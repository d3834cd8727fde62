"""Host: what a training step's sampling took, under the names of verl and of the users' documents."""

import math

import numpy as np

from dapo_jax.dynamic_sampling.accumulation import Accepted
from dapo_jax.dynamic_sampling.rounds import filtered_counts


def sampling_metrics(accepted: Accepted) -> dict[str, float]:
    """`train/` and `dynamic_sampling/` metrics of a step, over all groups that were evaluated in it."""
    rounds = accepted.rounds
    keep = np.concatenate([round_.keep for round_ in rounds] or [np.zeros(0, bool)])
    std = np.concatenate([round_.metric_std for round_ in rounds] or [np.zeros(0)])
    kept = int(keep.sum())
    generated = sum(int(round_.outcomes.lengths.sum()) for round_ in rounds)
    trained = accepted.experience.num_tokens if accepted.experience is not None else 0
    # A step that trains on carried groups alone has sampled nothing, and has no rates.
    rates = {"train/filter_rate": float(np.mean(~keep)), "train/mean_metric_std": float(std.mean())} if rounds else {}
    return rates | {
        "train/num_gen_batches": len(rounds),
        "train/num_kept_prompts": kept,
        "dynamic_sampling/num_gen_batches": len(rounds),
        "dynamic_sampling/num_accumulated_prompts": accepted.carried_in + kept,
        "dynamic_sampling/target_prompt_num": accepted.target,
        "dynamic_sampling/num_evaluated_prompts": len(keep),
        **{f"dynamic_sampling/filtered_{name}": count for name, count in filtered_counts(rounds).items()},
        "dynamic_sampling/num_requeued": accepted.num_requeued,
        "dynamic_sampling/num_discarded_valid": accepted.num_discarded,
        "dynamic_sampling/num_carried_in": accepted.carried_in,
        "dynamic_sampling/num_carried_out": len(accepted.state.carried) if accepted.state.carried is not None else 0,
        "dynamic_sampling/num_aborted": 0,  # a wave that was started is always finished
        "dynamic_sampling/num_stale": accepted.num_stale,
        "dynamic_sampling/num_skipped_uniform": accepted.num_skipped,
        "dynamic_sampling/partial_step": float(accepted.outcome != "full"),
        "dynamic_sampling/keep_rate_ema": accepted.state.keep_rate,
        "dynamic_sampling/effective_limit": accepted.limit if math.isfinite(accepted.limit) else 0,
        "dynamic_sampling/generated_tokens": generated,
        "dynamic_sampling/trained_tokens": trained,
        "dynamic_sampling/overgen_ratio": generated / max(trained, 1),
        "dynamic_sampling/accepted_len_over_finished_kept_len": _length_ratio(accepted),
    }


def _length_ratio(accepted: Accepted) -> float:
    """Mean response length of the accepted groups over that of all kept ones: not 1 in the mean means a bias."""
    kept = [round_.outcomes.lengths[round_.keep] for round_ in accepted.rounds if round_.keep.any()]
    if not kept or accepted.experience is None:
        return 1.0
    mean = accepted.experience.num_tokens / accepted.experience.finished.size
    return mean / max(float(np.concatenate(kept).mean()), 1e-8)
