"""Host: one generation round: sample, verify, shape the reward, and mark the groups worth training on."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jax.sharding import Mesh

from dapo_jax.dynamic_sampling.group_filter import FilterRule, group_statistics, keep_groups
from dapo_jax.parallel.sharding import fetch, put_rows
from dapo_jax.rewards.assembly import assemble_rewards
from dapo_jax.rollout.experience import Experience

# The reward after the KL divergence, if there is one in the reward; else seq_reward.
FINAL_REWARD = ("seq_final_reward", "token_level_rewards")


@dataclass(frozen=True)
class Round:
    """Groups of one generation round and the filter's verdict."""

    experience: Experience
    keep: np.ndarray  # [Q] bool
    metric_std: np.ndarray  # [Q] float32, population standard deviation of the metric


def shape_rewards(
    experience: Experience,
    *,
    max_response_length: int,
    overlong_buffer_length: int,
    overlong_penalty_factor: float,
    mesh: Mesh,
) -> Experience:
    """Adds the scores `overlong_reward` (penalty) and `seq_reward` (verifier's score + penalty)."""
    rows = (
        experience.scores["score"].astype(np.float32).reshape(-1),
        experience.mask.reshape(-1, experience.mask.shape[-1]),
    )
    rewards = assemble_rewards(
        *put_rows(rows, mesh),
        max_response_length=max_response_length,
        buffer_length=overlong_buffer_length,
        penalty_factor=overlong_penalty_factor,
    )
    shape = experience.finished.shape
    seq_reward = fetch(rewards.token_level_scores).sum(axis=-1)[: np.prod(shape)]
    penalty = fetch(rewards.overlong_penalty)[: np.prod(shape)]
    return experience.with_scores(seq_reward=seq_reward.reshape(shape), overlong_reward=penalty.reshape(shape))


def filter_groups(experience: Experience, metric: str, rule: FilterRule, mesh: Mesh) -> Round:
    """Marks the groups that `rule` keeps by their `metric`.

    A sample whose verification failed and that therefore lacks the metric counts like the lowest of its group; a group
    that has none is not kept.

    Raises:
        ValueError: the metric was not measured for a sample whose verification succeeded.
    """
    available = dict(experience.scores)
    if "seq_reward" in available:
        available |= dict.fromkeys(FINAL_REWARD, available.get("seq_final_reward", available["seq_reward"]))
    measured = {name: _without_failed(values, experience.failed) for name, values in available.items()}
    if experience.failed.all():
        measured.setdefault(metric, np.zeros(experience.failed.shape))
    if metric not in measured or np.isnan(measured[metric]).any():
        raise ValueError(
            f"algorithm.filter_groups.metric={metric!r} is not measured for every sample: choose one of "
            f"{sorted(name for name, values in measured.items() if not np.isnan(values).any())}, "
            "or let the reward function return it"
        )
    num_groups, num_samples = measured[metric].shape
    values = put_rows(measured[metric].astype(np.float32).reshape(-1), mesh)
    group_ids = np.arange(values.shape[0], dtype=np.int32) // num_samples  # rows of padding come after the groups
    statistics = group_statistics(
        values, put_rows(group_ids, mesh), num_groups=int(group_ids[-1]) + 1
    )
    keep, std = fetch((keep_groups(statistics, rule), statistics.std))
    unknown = np.isnan(available.get(metric, np.full(experience.failed.shape, np.nan))).all(axis=1)
    return Round(experience, keep[:num_groups] & ~unknown, std[:num_groups])


def _without_failed(values: np.ndarray, failed: np.ndarray) -> np.ndarray:
    """Values [Q, G] with the lowest of the group where a failed verification left none; 0 if the group has none."""
    lowest = np.min(values, axis=1, keepdims=True, initial=np.inf, where=~np.isnan(values))
    return np.where(failed & np.isnan(values), np.where(np.isinf(lowest), 0.0, lowest), values)


def keep_all(experience: Experience) -> Round:
    """The round of a run without a filter."""
    groups = len(experience)
    return Round(experience, np.ones(groups, bool), np.zeros(groups, np.float32))


def filtered_counts(rounds: Sequence[Round]) -> dict[str, int]:
    """How many dropped groups were all right, all wrong, and uniform in another way (or without `acc`)."""
    dropped = [round_.experience.score("acc")[~round_.keep] for round_ in rounds]
    accuracy = np.concatenate(dropped) if dropped else np.zeros((0, 1))
    correct = int(np.sum(np.all(accuracy == 1, axis=1)))
    wrong = int(np.sum(np.all(accuracy <= 0, axis=1)))
    return {"all_correct": correct, "all_wrong": wrong, "other": len(accuracy) - correct - wrong}
