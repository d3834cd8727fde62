"""Host: the log lines of dynamic sampling, in the words that existing log parsers read.

A round writes the same numbers in two forms: a block whose `Generated batch`, `Filtered (std=0)` and `Kept (std>0)`
lines DAPO log parsers look for, and one `[Dynamic Sampling]` line. The latter contains neither `std=0` nor `std>0`, so
that no parser counts a round twice. Rules other than `std` have their own words.
"""

import logging
from collections.abc import Mapping
from typing import NamedTuple

from dapo_jax.config.sections import FilterGroupsConfig

LOGGER = __name__
_LOGGER = logging.getLogger(LOGGER)


def log_start() -> None:
    """Logs that a step starts to sample."""
    _LOGGER.info("Starting rollout generation...")


class RuleWords(NamedTuple):
    """How a filter rule describes the groups that it drops and those that it keeps."""

    dropped: str
    kept: str


UNIFORM = RuleWords("std=0", "std>0")


def rule_words(options: FilterGroupsConfig) -> RuleWords:
    """The words of the rule; those of `std` always contain `std=0` and `std>0`."""
    if options.rule == "std":
        threshold = options.std_threshold
        return RuleWords(f"std=0..{threshold:g}", f"std>{threshold:g}") if threshold else UNIFORM
    if options.rule == "mean_range":
        low, high = f"{options.filter_low:g}", f"{options.filter_high:g}"
        return RuleWords(f"mean<={low} or mean>={high}", f"{low}<mean<{high}")
    return RuleWords("not mixed", "mixed")


def log_round(
    *,
    step: int,
    round_number: int,
    num_prompts: int,
    num_samples: int,
    metric: str,
    words: RuleWords = UNIFORM,
    num_kept: int,
    mean_std: float,
    num_accumulated: int,
    target: int,
    last: bool = False,
) -> None:
    """Logs one generation round after its groups are filtered.

    It takes eleven arguments because the log lines hold that many numbers.

    Args:
        step: training step.
        round_number: round within the step, from 1.
        num_prompts: groups evaluated in this round.
        num_samples: responses per group.
        metric: name of the metric that the filter reads.
        words: how the rule describes that metric.
        num_kept: groups of this round that passed the filter.
        mean_std: mean over the round's groups of the metric's standard deviation.
        num_accumulated: groups kept in the step so far, this round included.
        target: groups that the step needs.
        last: no round follows, even if the target is missed (a limit is reached, or the data ends).
    """
    num_filtered = num_prompts - num_kept
    _LOGGER.info(
        "Generated batch %d, %d prompts, %d trajectories", round_number, num_prompts, num_prompts * num_samples
    )
    _LOGGER.info("Filter groups enabled, metric=%s", metric)
    _LOGGER.info("Computing metric std for %d prompts...", num_prompts)
    _LOGGER.info("Filter statistics: Total prompts: %d", num_prompts)
    _LOGGER.info("Filtered (%s): %d (%.1f%%)", words.dropped, num_filtered, 100 * num_filtered / num_prompts)
    _LOGGER.info("Kept (%s): %d prompts (%.1f%%)", words.kept, num_kept, 100 * num_kept / num_prompts)
    _LOGGER.info("Mean std: %.3f", mean_std)
    _LOGGER.info("Accumulated prompts: %d / %d", num_accumulated, target)
    _LOGGER.info(
        "[Dynamic Sampling] Step %d, Gen batch %d: Kept %d/%d prompts (filtered %d trajectories), Accumulated: %d/%d",
        step,
        round_number,
        num_kept,
        num_prompts,
        num_filtered * num_samples,
        num_accumulated,
        target,
    )

    enough = num_accumulated >= target
    _LOGGER.info("num_prompt_in_batch=%d %s prompt_bsz=%d", num_accumulated, ">=" if enough else "<", target)
    if not enough and not last:
        _LOGGER.info("num_gen_batches=%d. Keep generating...", round_number)
        _LOGGER.info("[Dynamic Sampling] Need more prompts, fetching next batch...")


def log_enough(num_trajectories: int) -> None:
    """Logs that the step has its groups and how many responses go into training."""
    _LOGGER.info("Collected enough data. Taking first %d trajectories.", num_trajectories)
    _LOGGER.info("[Dynamic Sampling] Accumulated enough prompts, proceeding with %d trajectories", num_trajectories)


def log_step(metrics: Mapping[str, float]) -> None:
    """Logs the rounds and the filter rate of a step before it trains. Without a round there is no rate."""
    _LOGGER.info("train/num_gen_batches: %d", metrics["train/num_gen_batches"])
    if "train/filter_rate" in metrics:
        _LOGGER.info("train/filter_rate: %.3f", metrics["train/filter_rate"])
    _LOGGER.info("Starting training iteration...")
