"""Host: the groups of one generation round, and which of them are worth training on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jax.sharding import Mesh

from dapo_jax.config.sections import FilterGroupsConfig
from dapo_jax.data.experience import Experience, Outcomes, comparable
from dapo_jax.dynamic_sampling.group_filter import group_statistics, keep_groups
from dapo_jax.dynamic_sampling.prompt_stream import History
from dapo_jax.errors import InputError
from dapo_jax.parallel.sharding import fetch, put_rows

# Two names of the final reward: less the KL divergence if use_kl_in_reward subtracts it, else seq_reward.
FINAL_REWARD = ("seq_final_reward", "token_level_rewards")


@dataclass(frozen=True)
class Round:
    """Groups of one generation round and the filter's verdict."""

    experience: Experience
    keep: np.ndarray  # [Q] bool
    metric_std: np.ndarray  # [Q] float32, population standard deviation of the metric
    lowest: Sequence[tuple[str, Mapping[str, float]]] = ()  # [Q] of `rewards.lowest.lowest_given`

    @property
    def verdicts(self) -> "Verdicts":
        """What remains of the round once the groups to train on are taken out."""
        return Verdicts(self.experience.outcomes, self.keep, self.metric_std, self.lowest)


@dataclass(frozen=True)
class Verdicts:
    """The outcomes of a round's Q groups and the filter's verdicts; no tokens."""

    outcomes: Outcomes
    keep: np.ndarray  # [Q] bool
    metric_std: np.ndarray  # [Q] float32
    lowest: Sequence[tuple[str, Mapping[str, float]]] = ()  # [Q]


def filter_groups(experience: Experience, options: FilterGroupsConfig, mesh: Mesh) -> Round:
    """Marks the groups that `options.rule` keeps by their metric; all of them without a filter.

    A response without a verdict is no sample of its group, and a group of several samples with fewer than two verdicts
    is never kept. A response that made its verifier fail, and so lacks the metric, counts like the lowest of its group;
    a group without any is not kept.

    Raises:
        ValueError: the metric was not measured for a sample whose verification succeeded.
    """
    known = experience.known
    enough = comparable(known)
    if not options.enable:
        return Round(experience, enough, np.zeros(len(experience), np.float32))
    available, metric = dict(experience.scores), options.metric
    if "seq_reward" in available:
        available |= dict.fromkeys(FINAL_REWARD, available.get("seq_final_reward", available["seq_reward"]))
    found = available.get(metric, np.full(experience.failed.shape, np.nan))
    if _lacks_some(found, experience.failed):
        raise InputError(
            f"algorithm.filter_groups.metric={metric!r} is not measured for every sample: choose one of "
            f"{sorted(name for name, values in available.items() if not _lacks_some(values, experience.failed))}, "
            "or let the reward function, or each step of the environment, return it"
        )
    measured = ~np.isnan(found)
    some = measured.any(axis=1)
    lowest = np.where(some, np.min(found, axis=1, initial=np.inf, where=measured), 0.0)
    filled = np.where(measured, found, lowest[:, None])
    num_groups, num_samples = filled.shape
    values = put_rows(filled.astype(np.float32).reshape(-1), mesh)
    group_ids = np.arange(values.shape[0], dtype=np.int32) // num_samples  # padding comes after the groups
    all_groups = int(group_ids[-1]) + 1
    group_ids[: known.size][~known.reshape(-1)] = all_groups  # belongs to none
    statistics = group_statistics(values, put_rows(group_ids, mesh), num_groups=all_groups)
    keep, std = fetch((keep_groups(statistics, options), statistics.std))
    return Round(experience, keep[:num_groups] & some & enough, std[:num_groups])


def _lacks_some(values: np.ndarray, failed: np.ndarray) -> bool:
    """Whether values [Q, G] are missing where the verification did not fail."""
    return bool((np.isnan(values) & ~failed).any())


def updated_history(
    history: History, verdicts: Verdicts, options: FilterGroupsConfig, *, decay: float, final: np.ndarray
) -> History:
    """The history after a round's groups. Mixed is what the filter keeps; without one, a group whose `acc` differ.

    It learns nothing from a group in which a verification failed: it may be mixed but for that.

    Args:
        decay: as in `History.updated`.
        final: [Q] bool, groups that no schedule samples again.
    """
    outcomes = verdicts.outcomes
    chosen = final & ~outcomes.failed.any(axis=1)
    accuracy = outcomes.score("acc")
    mixed = verdicts.keep if options.enable else accuracy.max(axis=1) > accuracy.min(axis=1)
    return history.updated(outcomes.rows[chosen], mixed[chosen], accuracy.mean(axis=1)[chosen], decay=decay)


def filtered_counts(rounds: Sequence[Verdicts]) -> dict[str, int]:
    """How many dropped groups were all right, all wrong, and neither (or without `acc`, or with too few verdicts)."""
    dropped = [round_.outcomes.score("acc")[~round_.keep] for round_ in rounds]
    accuracy = np.concatenate(dropped) if dropped else np.zeros((0, 1))
    missing = np.isnan(accuracy)
    enough = comparable(~missing)
    correct = int(np.sum(np.all((accuracy >= 1) | missing, axis=1) & enough))
    wrong = int(np.sum(np.all((accuracy <= 0) | missing, axis=1) & enough))
    return {"all_correct": correct, "all_wrong": wrong, "other": len(accuracy) - correct - wrong}
