"""Host: what a step does when fewer groups were kept than it trains on: policies on_limit, on_exhausted, on_empty."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from dapo_jax.config.sections import FilterGroupsConfig
from dapo_jax.data.experience import Experience, comparable, join
from dapo_jax.dynamic_sampling.rounds import Verdicts, filtered_counts
from dapo_jax.dynamic_sampling.schedule import fixed_limit
from dapo_jax.monitor.filter_log import UNIFORM, rule_words
from dapo_jax.parallel.processes import LastingFailure
from dapo_jax.rewards.verification import describe_failures

if TYPE_CHECKING:
    from dapo_jax.dynamic_sampling.accumulation import Found

logger = logging.getLogger(__name__)

FILTER = "algorithm.filter_groups"
SOLVED = "solved"  # the outcome of a step that has nothing left to learn from


def uses_dropped(options: FilterGroupsConfig) -> bool:
    """Whether a step may fall back to groups that the filter has dropped."""
    return options.on_limit == "fallback_unfiltered" or options.on_empty == "train_unfiltered"


def groups_despite(
    found: "Found", kept: Experience | None, dropped: Experience | None
) -> tuple[Experience | None, str]:
    """The groups that the step trains on all the same (None: there are none), and the name of this outcome.

    If the policy is error and the data `is_solved`, the outcome is SOLVED.

    Args:
        found: by a step that may sample no further prompts and has too few kept groups.
        kept: with carried groups.
        dropped: unfiltered groups for a fall-back.

    Raises:
        RuntimeError: the policy is error, and the data is not solved.
    """
    step, target, options = found.step, found.target, found.options
    policy = options.on_exhausted if found.exhausted else options.on_limit
    if policy == "fallback_unfiltered":
        unfiltered = min(target - len(kept or ()), len(dropped or ()))
        filled = join([kept, dropped.select(np.arange(unfiltered)) if dropped else None])
        if filled is not None:
            logger.warning("step %d: %d of %d groups are unfiltered", step, unfiltered, len(filled))
            return filled.select(np.argsort(filled.numbers, kind="stable")), "fallback"
    elif policy != "error" and kept is not None:
        reason = "the epoch has ended" if found.exhausted else "the limit of rounds is reached"
        logger.warning("step %d: training on %d of %d groups (%s)", step, len(kept), target, reason)
        return kept, "partial"
    if "error" in (policy, options.on_empty):
        if is_solved(found.rounds):
            return None, SOLVED
        raise LastingFailure(_message(found, len(kept or ())))
    if options.on_empty == "train_unfiltered" and dropped is not None:
        logger.warning("step %d: no group was kept, training on unfiltered ones", step)
        return dropped, "unfiltered"
    logger.warning("step %d: no group was kept, the step trains on nothing", step)
    return None, "skipped"


def is_solved(rounds: Sequence[Verdicts]) -> bool:
    """Whether more than half of the groups that the filter dropped are all right, and more than it kept."""
    counts, kept = filtered_counts(rounds), sum(int(round_.keep.sum()) for round_ in rounds)
    return counts["all_correct"] > max(sum(counts.values()) / 2, kept)


def _message(found: "Found", kept: int) -> str:
    """How many groups were all right and all wrong, and the ways out."""
    options = found.options
    if found.exhausted:
        reason, first, policy = "at the end of the epoch", "set on_exhausted=next_epoch", "on_exhausted"
    else:
        bound, option = "max_num_gen_batches", "max_num_gen_batches"
        if found.limit < fixed_limit(options):
            bound, option = "adaptive_limit", "adaptive_limit.slack"
        reason = f"after {found.num_rounds} generation rounds ({FILTER}.{bound})"
        first, policy = f"raise {option}", "on_limit"
    last = f"{FILTER}.{policy}=partial"
    if getattr(options, policy) == "partial":  # no group exists to train on
        last = f"{FILTER}.on_empty=skip_step"
    counts, evaluated = filtered_counts(found.rounds), sum(len(round_.keep) for round_ in found.rounds)
    failed = describe_failures([round_.outcomes for round_ in found.rounds])
    words = rule_words(options)
    unknown = sum(int((~comparable(round_.outcomes.known)).sum()) for round_ in found.rounds)
    other = "uniform otherwise" if words == UNIFORM else f"dropped otherwise ({words.dropped})"
    other += f", {unknown} had too few verdicts" * bool(unknown)
    return (
        f"only {kept} of data.train_batch_size={found.target} groups kept {reason}: of "
        f"{evaluated} groups {counts['all_correct']} were all right, {counts['all_wrong']} all wrong, "
        f"{counts['other'] - unknown} {other}{failed and f' ({failed})'}. "
        f"Change one of these, then rerun: {first}, lower data.train_batch_size, or set {last}; or "
        "change the difficulty of the data (or raise rollout.n), so that more groups hold both right and wrong answers"
    )
