"""Host: metric names and formulas for the groups and lengths of a step."""

from collections.abc import Mapping

import numpy as np


def spread(name: str, values: np.ndarray) -> dict[str, float]:
    """`name`/mean, /max and /min of all values."""
    return {
        f"{name}/mean": float(np.mean(values)),
        f"{name}/max": float(np.max(values)),
        f"{name}/min": float(np.min(values)),
    }


def score_metrics(scores: Mapping[str, np.ndarray]) -> dict[str, float]:
    """`rollout/{score}/{mean,max,min}` over the means of the groups; scores [Q, G], NaN where there is none."""
    metrics = {}
    for name, groups in _measured(scores).items():
        metrics |= spread(f"rollout/{name}", np.array([np.mean(group) for group in groups]))
    return metrics


def length_metrics(name: str, lengths: np.ndarray, limit: int) -> dict[str, float]:
    """`name`_length/{mean,max,min,clip_ratio}: tokens, and the share of rows that are as long as allowed."""
    return {**spread(f"{name}_length", lengths), f"{name}_length/clip_ratio": float(np.mean(lengths >= limit))}


def advantage_metrics(name: str, values: np.ndarray) -> dict[str, float]:
    """`critic/{name}/{mean,max,min}` over tokens; 0 if there are none."""
    return spread(f"critic/{name}", values if values.size else np.zeros(1))


def explained_variance(values: np.ndarray, returns: np.ndarray) -> float:
    """1 - Var(returns - values) / Var(returns): 1 is a perfect critic, 0 one that is no better than a constant.

    As verl, with sample variances and 1e-5 in the denominator.
    """
    if returns.size < 2:
        return 0.0
    return float(1 - np.var(returns - values, ddof=1) / (np.var(returns, ddof=1) + 1e-5))


def accuracy_at(task: str, scores: Mapping[str, np.ndarray]) -> dict[str, float]:
    """`eval/{task}/{score}/{mean@k,std@k}`: mean over problems of each problem's k samples; scores [Q, k].

    The standard deviation is the population's, within a problem. NaN stands for a sample without the score.
    """
    metrics = {}
    for name, groups in _measured(scores).items():
        samples = scores[name].shape[1]
        metrics[f"eval/{task}/{name}/mean@{samples}"] = float(np.mean([np.mean(group) for group in groups]))
        metrics[f"eval/{task}/{name}/std@{samples}"] = float(np.mean([np.std(group) for group in groups]))
    return metrics


def _measured(scores: Mapping[str, np.ndarray]) -> dict[str, list[np.ndarray]]:
    """Each score's values group by group, without those that are NaN; groups and scores that have none are left out."""
    groups = {name: [group[~np.isnan(group)] for group in values] for name, values in scores.items()}
    return {name: [group for group in found if group.size] for name, found in groups.items() if any(map(len, found))}
