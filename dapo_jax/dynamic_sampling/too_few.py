"""Host: what a step does when fewer groups were kept than it trains on: policies on_limit, on_exhausted, on_empty."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dapo_jax.config.sections import FilterGroupsConfig
from dapo_jax.data.experience import Experience, comparable, describe_failures, join
from dapo_jax.dynamic_sampling.rounds import Verdicts, filtered_counts
from dapo_jax.dynamic_sampling.schedule import fixed_limit
from dapo_jax.monitor.filter_log import UNIFORM, rule_words
from dapo_jax.parallel.processes import LastingFailure

logger = logging.getLogger(__name__)

FILTER = "algorithm.filter_groups"
SOLVED = "solved"  # the outcome of a step that has nothing left to learn from


@dataclass(frozen=True)
class Shortage:
    """A step that may sample no further prompts and has too few kept groups."""

    step: int
    target: int  # groups
    kept: Experience | None  # carried groups included
    dropped: Experience | None  # unfiltered groups for a fall-back
    rounds: Sequence[Verdicts]
    num_rounds: int
    limit: float  # rounds that were allowed
    exhausted: bool  # the epoch is at its end, not the rounds


def uses_dropped(options: FilterGroupsConfig) -> bool:
    """Whether a step may fall back to groups that the filter has dropped."""
    return options.on_limit == "fallback_unfiltered" or options.on_empty == "train_unfiltered"


def groups_despite(shortage: Shortage, options: FilterGroupsConfig) -> tuple[Experience | None, str]:
    """The groups that the step trains on all the same (None: there are none), and the name of this outcome.

    If the policy is error and the data `is_solved`, the outcome is SOLVED.

    Raises:
        RuntimeError: the policy is error, and the data is not solved.
    """
    step, target, kept, dropped = shortage.step, shortage.target, shortage.kept, shortage.dropped
    policy = options.on_exhausted if shortage.exhausted else options.on_limit
    if policy == "fallback_unfiltered":
        unfiltered = min(target - len(kept or ()), len(dropped or ()))
        filled = join([kept, dropped.select(np.arange(unfiltered)) if dropped else None])
        if filled is not None:
            logger.warning("step %d: %d of %d groups are unfiltered", step, unfiltered, len(filled))
            return filled.select(np.argsort(filled.numbers, kind="stable")), "fallback"
    elif policy != "error" and kept is not None:
        reason = "the epoch has ended" if shortage.exhausted else "the limit of rounds is reached"
        logger.warning("step %d: training on %d of %d groups (%s)", step, len(kept), target, reason)
        return kept, "partial"
    if "error" in (policy, options.on_empty):
        if is_solved(shortage.rounds):
            return None, SOLVED
        raise LastingFailure(_message(shortage, options))
    if options.on_empty == "train_unfiltered" and dropped is not None:
        logger.warning("step %d: no group was kept, training on unfiltered ones", step)
        return dropped, "unfiltered"
    logger.warning("step %d: no group was kept, the step trains on nothing", step)
    return None, "skipped"


def is_solved(rounds: Sequence[Verdicts]) -> bool:
    """Whether more than half of the groups that the filter dropped are all right, and more than it kept."""
    counts, kept = filtered_counts(rounds), sum(int(round_.keep.sum()) for round_ in rounds)
    return counts["all_correct"] > max(sum(counts.values()) / 2, kept)


def _message(shortage: Shortage, options: FilterGroupsConfig) -> str:
    """How many groups were all right and all wrong, and the ways out."""
    if shortage.exhausted:
        reason, first, policy = "at the end of the epoch", "set on_exhausted=next_epoch", "on_exhausted"
    else:
        bound, option = "max_num_gen_batches", "max_num_gen_batches"
        if shortage.limit < fixed_limit(options):
            bound, option = "adaptive_limit", "adaptive_limit.slack"
        reason = f"after {shortage.num_rounds} generation rounds ({FILTER}.{bound})"
        first, policy = f"raise {option}", "on_limit"
    last = f"{FILTER}.{policy}=partial"
    if getattr(options, policy) == "partial":  # no group exists to train on
        last = f"{FILTER}.on_empty=skip_step"
    counts, evaluated = filtered_counts(shortage.rounds), sum(len(round_.keep) for round_ in shortage.rounds)
    failed = describe_failures([round_.outcomes for round_ in shortage.rounds])
    words = rule_words(options)
    unknown = sum(int((~comparable(round_.outcomes.known)).sum()) for round_ in shortage.rounds)
    other = "uniform otherwise" if words == UNIFORM else f"dropped otherwise ({words.dropped})"
    other += f", {unknown} had too few verdicts" * bool(unknown)
    return (
        f"only {len(shortage.kept or ())} of data.train_batch_size={shortage.target} groups kept {reason}: of "
        f"{evaluated} groups {counts['all_correct']} were all right, {counts['all_wrong']} all wrong, "
        f"{counts['other'] - unknown} {other}{failed and f' ({failed})'}. "
        f"Change one of these, then rerun: {first}, lower data.train_batch_size, or set {last}; or "
        "change the difficulty of the data (or raise rollout.n), so that more groups hold both right and wrong answers"
    )
