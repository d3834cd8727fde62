"""Host: alarms about a training step: a metric alarm/* of 0 or 1 each, and a warning when one is first raised."""

import logging
import math
from collections.abc import Mapping
from typing import NamedTuple

from dapo_jax.config.sections import AlarmConfig

_DECAY = 0.9  # of the running means
_ALL = 1 - 1e-9  # a share above it means all
_LEAST_KL = 1e-3  # nats per token; smaller jumps mean nothing
_BEST = "best heldout"  # the highest held-out accuracy so far
_LEAST_MISMATCH = 1e-5  # the same for the k3 estimate of the mismatch

logger = logging.getLogger(__name__)


class _Seen(NamedTuple):
    value: float | None  # None: the step has no such metric
    limit: float | None  # None: nothing to compare with yet
    below: bool = False  # raise the alarm below the limit, not above it


def raise_alarms(
    metrics: Mapping[str, float], memory: Mapping[str, float], settings: AlarmConfig, step: int
) -> tuple[dict[str, float], dict[str, float]]:
    """The metrics alarm/* of a training step, and the memory after it.

    - entropy_collapse, entropy_explosion: actor/entropy against the first step's
    - kl_jump, kl_loss_jump: actor/ppo_kl (absolute) and actor/kl_loss against their running means
    - mismatch_growth: rollout_corr/k3_kl against its running mean
    - all_uniform: in every sampled group with two verdicts or more, all have the same `acc`
    - truncation: response_length/clip_ratio
    - reward_errors: share of samples whose verification failed
    - reward_workers: verifier processes died
    - score_by_length: reward/length_correlation (absolute): advantages among equally right answers follow the length
    - slow_process: the greatest time/slowest_process/*

    Args:
        memory: of the previous step, {} for the first: running means, and which alarms are on.
    """
    memory = dict(memory)
    entropy = metrics.get("actor/entropy")
    first = memory.get("first entropy")
    ppo_kl, correlation = (
        abs(metrics[name]) if name in metrics else None for name in ("actor/ppo_kl", "reward/length_correlation")
    )
    slowest = max((value for name, value in metrics.items() if name.startswith("time/slowest_process/")), default=None)
    seen = {
        "entropy_collapse": _Seen(entropy, _times(first, settings.entropy_collapse), below=True),
        "entropy_explosion": _Seen(entropy, _times(first, settings.entropy_explosion)),
        "kl_jump": _against_mean(memory, "ppo_kl", ppo_kl, settings.kl_jump, _LEAST_KL),
        "kl_loss_jump": _against_mean(memory, "kl_loss", metrics.get("actor/kl_loss"), settings.kl_jump, _LEAST_KL),
        "mismatch_growth": _against_mean(
            memory, "mismatch", metrics.get("rollout_corr/k3_kl"), settings.mismatch_growth, _LEAST_MISMATCH
        ),
        "all_uniform": _Seen(metrics.get("dynamic_sampling/uniform_share"), _ALL),
        "truncation": _Seen(metrics.get("response_length/clip_ratio"), settings.truncation),
        "reward_errors": _Seen(metrics.get("reward/error_share"), settings.reward_errors),
        "reward_workers": _Seen(metrics.get("reward/workers_replaced"), 0.0),
        "score_by_length": _Seen(correlation, settings.score_by_length),
        "slow_process": _Seen(slowest, settings.slow_process),
    }
    if first is None and entropy is not None and math.isfinite(entropy):
        memory["first entropy"] = entropy
    return _raised(seen, memory, step)


def raise_evaluation_alarms(
    accuracy: float | None, memory: Mapping[str, float], settings: AlarmConfig, step: int
) -> tuple[dict[str, float], dict[str, float]]:
    """The metric alarm/heldout_drop of an evaluation, and the memory after it. No metric without a held-out accuracy.

    The alarm is raised when held-out accuracy is far below the run's best, the first evaluation included. Reward
    hacking lowers it while the training reward rises, which the other alarms may miss.

    Args:
        accuracy: the mean held-out accuracy of the evaluation; None without held-out problems.
        memory: as for `raise_alarms`.
    """
    if accuracy is None:
        return {}, dict(memory)
    best = memory.get(_BEST)
    limit = settings.heldout_drop * best if best is not None and best > 0 else None
    memory = {**memory, _BEST: accuracy if best is None else max(best, accuracy)}
    return _raised({"heldout_drop": _Seen(accuracy, limit, below=True)}, memory, step)


def without_held_out(memory: Mapping[str, float]) -> dict[str, float]:
    """`memory` before the first evaluation on other held-out problems."""
    return {name: value for name, value in memory.items() if name not in (_BEST, "heldout_drop")}


def _raised(
    seen: Mapping[str, _Seen], memory: dict[str, float], step: int
) -> tuple[dict[str, float], dict[str, float]]:
    """The alarms as metrics, with a warning for each new one, and the updated memory."""
    alarms = {}
    for name, (value, limit, below) in seen.items():
        on = value is not None and (not math.isfinite(value) or _beyond(value, limit, below))
        if on and not memory.get(name):
            logger.warning(
                "alarm at step %d: %s: %.4g, the limit is %s (docs/reliability.md)",
                step,
                name,
                value,
                "-" if limit is None else f"{limit:.4g}",
            )
        memory[name] = alarms[f"alarm/{name}"] = float(on)
    return alarms, memory


def _beyond(value: float, limit: float | None, below: bool) -> bool:
    return limit is not None and (value < limit if below else value > limit)


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _against_mean(memory: dict[str, float], name: str, value: float | None, factor: float, least: float) -> _Seen:
    """`value` against `factor` times its running mean. The mean takes it up, clipped to that limit."""
    if value is None or not math.isfinite(value):
        return _Seen(value, None)
    mean = memory.get(f"mean {name}")
    if mean is None:
        memory[f"mean {name}"] = value
        return _Seen(value, None)
    limit = factor * max(mean, least / factor)
    memory[f"mean {name}"] = _DECAY * mean + (1 - _DECAY) * min(value, limit)
    return _Seen(value, limit)
