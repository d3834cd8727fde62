"""Host: the groups that a step trains on, and what becomes of the others; with too few, what the policies say.

The policies are on_limit, on_exhausted and on_empty of algorithm.filter_groups.
"""

import logging
from dataclasses import dataclass
from itertools import compress

import numpy as np

from dapo_jax.data.experience import Experience, comparable, join
from dapo_jax.dynamic_sampling.accumulation import FILTER, Found, Sampled
from dapo_jax.dynamic_sampling.prompt_stream import StreamState
from dapo_jax.dynamic_sampling.rounds import Verdicts, filtered_counts, updated_history
from dapo_jax.dynamic_sampling.schedule import fixed_limit
from dapo_jax.monitor import filter_log
from dapo_jax.parallel.processes import LastingFailure
from dapo_jax.rewards.lowest import updated_lowest
from dapo_jax.rewards.verification import describe_failures

logger = logging.getLogger(__name__)

SOLVED = "solved"  # the outcome of a step that has nothing left to learn from


@dataclass(frozen=True)
class Accepted:
    """What a training step trains on, and what finding it took."""

    experience: Experience | None  # the groups; None if the step is skipped, or the data solved
    rounds: list[Verdicts]  # all groups evaluated in this step, by what was judged together
    num_rounds: int  # rounds' worth of prompts that were judged, with the last, perhaps incomplete one
    limit: float  # rounds allowed in the end
    outcome: str  # full | partial | fallback | unfiltered | skipped | solved
    target: int
    carried_in: int  # groups
    num_stale: int  # carried groups that were too old
    num_skipped: int  # prompts before the next step's first that their history left out
    num_requeued: int  # evaluated groups that will be sampled again
    num_discarded: int  # kept groups that are dropped
    state: StreamState  # for the next step
    sampled: Sampled


def accept(found: Found, sampled: Sampled) -> Accepted:
    """Chooses the groups to train on, and what becomes of the others.

    Raises:
        RuntimeError: too few groups, the policy is error and the data is not solved: the message counts the groups that
            were all right and all wrong, and names the ways out. Or too many verifications failed.
    """
    found.log_round(last=True)
    if not found.segment_steps:  # of the few groups that may have ended, all may fail by chance
        found.check_verdicts()
    options, before, carried_in = found.options, found.state, found.schedule.carried
    kept = join([found.carried, *found.kept_groups])
    next_prompt, carried, discarded = found.cursor, None, 0
    if kept is not None and len(kept) >= found.target:
        trained, outcome = kept.select(np.arange(found.target)), "full"
        if options.enable:
            filter_log.log_enough(trained.finished.size)
        left = {"carry": len(kept), "requeue": carried_in}.get(options.leftover, 0)
        carried = join([kept.select(np.arange(found.target, left))])
        if options.leftover == "requeue":
            next_prompt = max(int(trained.numbers[-1]) + 1, before.next_prompt)
        elif options.leftover == "discard":
            discarded = len(kept) - found.target
    elif found.segment_steps:
        trained, outcome = kept, "skipped" if kept is None else "partial"
        numbers = found.step, len(kept or ()), found.target, len(sampled.left or ())
        logger.info("step %d: training on %d of %d groups, %d are under way", *numbers)
    else:
        trained, outcome = _too_few(found, kept, join(found.dropped_groups))
    history, lowest = before.history, before.lowest
    for verdicts in found.rounds:
        final = verdicts.outcomes.numbers < next_prompt  # no schedule samples these again
        history = updated_history(history, verdicts, options, decay=found.prompts.curriculum.decay, final=final)
        lowest = updated_lowest(lowest, compress(verdicts.lowest, final))
    keep_rate = found.schedule.keep_rate_after(kept=found.kept, evaluated=found.evaluated)
    return Accepted(
        experience=trained,
        rounds=found.rounds,
        num_rounds=found.num_rounds,
        limit=found.limit,
        outcome=outcome,
        target=found.target,
        carried_in=carried_in,
        num_stale=found.num_stale,
        num_skipped=next_prompt - before.next_prompt - sum(number < next_prompt for number in found.begun),
        num_requeued=sum(int(np.sum(one.outcomes.numbers >= next_prompt)) for one in found.rounds),
        num_discarded=discarded,
        state=StreamState(next_prompt, keep_rate, history, carried, sampled.left, lowest),
        sampled=sampled,
    )


def _too_few(found: Found, kept: Experience | None, dropped: Experience | None) -> tuple[Experience | None, str]:
    """The groups that the step trains on all the same (None: there are none), and the name of this outcome.

    Data is solved if more than half of the groups that the filter dropped are all right, and more than it kept.

    Args:
        found: by a step that may sample no further prompts and has too few kept groups.
        kept: with carried groups.
        dropped: unfiltered groups for a fall-back.
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
        counts = filtered_counts(found.rounds)
        if counts["all_correct"] > max(sum(counts.values()) / 2, found.kept):
            return None, SOLVED
        raise LastingFailure(_message(found, len(kept or ())))
    if options.on_empty == "train_unfiltered" and dropped is not None:
        logger.warning("step %d: no group was kept, training on unfiltered ones", step)
        return dropped, "unfiltered"
    logger.warning("step %d: no group was kept, the step trains on nothing", step)
    return None, "skipped"


def _message(found: Found, kept: int) -> str:
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
    counts = filtered_counts(found.rounds)
    failed = describe_failures([round_.outcomes for round_ in found.rounds])
    words = filter_log.rule_words(options)
    unknown = sum(int((~comparable(round_.outcomes.known)).sum()) for round_ in found.rounds)
    other = "uniform otherwise" if words == filter_log.UNIFORM else f"dropped otherwise ({words.dropped})"
    other += f", {unknown} had too few verdicts" * bool(unknown)
    if 0 < unknown == sum(counts.values()):
        last += "; or let the reward function give more verdicts"
    else:
        last += "; or change the difficulty of the data (or raise rollout.n), so that more groups hold both right and "
        last += "wrong answers" + ", or correct the reward function" * (counts["all_wrong"] == found.evaluated)
    return (
        f"only {kept} of data.train_batch_size={found.target} groups kept {reason}: of "
        f"{found.evaluated} groups {counts['all_correct']} were all right, {counts['all_wrong']} all wrong, "
        f"{counts['other'] - unknown} {other}{failed and f' ({failed})'}. "
        f"Change one of these, then rerun: {first}, lower data.train_batch_size, or set {last}"
    )
