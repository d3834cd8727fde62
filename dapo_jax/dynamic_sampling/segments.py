"""Host: a training step of partial rollouts, whose responses advance by one segment (rollout.segment_length).

A step continues all responses that earlier steps have begun, begins new groups, and trains on groups whose responses
have all ended: those carried from earlier steps, then those begun first. It never waits for a group, so a step may be
partial; the first ones are, and begin as many groups as any other.
"""

import logging
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from dapo_jax.config.sections import FilterGroupsConfig
from dapo_jax.data.experience import Experience, join, total_failure
from dapo_jax.data.work import total_work
from dapo_jax.dynamic_sampling.accumulation import Accepted
from dapo_jax.dynamic_sampling.prompt_stream import PromptSource, StreamState
from dapo_jax.dynamic_sampling.rounds import Round, log_round, updated_history, updated_lowest
from dapo_jax.dynamic_sampling.schedule import MIN_KEEP_RATE, fixed_limit, running_keep_rate
from dapo_jax.monitor import filter_log
from dapo_jax.parallel.processes import SharedFailure

logger = logging.getLogger(__name__)


class Advance(NamedTuple):
    """What a step does with groups."""

    begin: Callable[[list[int]], Experience]  # prompt numbers -> the first segment of their responses
    go_on: Callable[[Experience], Experience]  # another segment of the responses that have not ended
    ended: Callable[[Experience], np.ndarray]  # [Q, G] bool
    judge: Callable[[Experience], Round]  # verdicts and filter, of groups that have ended


def groups_to_begin(target: int, *, carried: int, keep_rate: float, segment_steps: int, gen_batch_size: int) -> int:
    """Prompts that a step begins: those expected to keep what a step trains on, and to hold a stock of carried groups.

    The stock is sqrt(target) groups, about one standard deviation of what a step may lack. Groups end up to
    segment_steps - 1 steps after they are begun, so a step corrects the stock by one part in segment_steps: more would
    let it swing. The result is in whole quarters of gen_batch_size, so that few sizes are compiled.
    """
    correction = (math.sqrt(target) - carried) / segment_steps
    wanted = (target + correction) / max(keep_rate, MIN_KEEP_RATE)
    quarter = max(gen_batch_size // 4, 1)
    return max(round(wanted / quarter), 0) * quarter


def accumulate_segments(
    advance: Advance,
    state: StreamState,
    prompts: PromptSource,
    options: FilterGroupsConfig,
    *,
    target: int,
    gen_batch_size: int,
    segment_steps: int,
    step: int,
    max_error_share: float = 1.0,
) -> Accepted:
    """The groups that training step `step` trains on; state.begun are those under way.

    Args:
        target: groups per training step.
        gen_batch_size: prompts per round; a step begins at most max_num_gen_batches rounds.
        segment_steps: training steps that the longest response takes.
        step: training step, from 1.
        max_error_share: of verifications that may fail, see `total_failure`.

    Raises:
        RuntimeError: too many verifications failed.
    """
    carried, num_stale = state.fresh(step, options.leftover_max_staleness)
    limit, num_carried = fixed_limit(options), len(carried or ())
    wanted = groups_to_begin(
        target,
        carried=num_carried,
        keep_rate=state.keep_rate,
        segment_steps=segment_steps,
        gen_batch_size=gen_batch_size,
    )
    most = int(min(wanted, limit * gen_batch_size))
    numbers, next_prompt = prompts.numbers(state.history, state.next_prompt, most, math.inf)
    before = 0 if state.begun is None else state.begun.num_tokens
    parts = [] if state.begun is None else [advance.go_on(state.begun)]
    if numbers:
        parts.append(advance.begin(numbers))
    kept, begun, rounds, history, keep_rate = carried, None, [], state.history, state.keep_rate
    lowest = dict(state.lowest)
    if groups := join(parts):
        ended = advance.ended(groups).all(axis=1)
        begun = join([groups.select(np.flatnonzero(~ended))])
        if ended.any():
            judged = advance.judge(groups.select(np.flatnonzero(ended)))
            rounds = [judged.verdicts]
            history = updated_history(history, rounds[0], options, decay=prompts.decay)
            lowest = updated_lowest(lowest, rounds[0])
            keep_rate = running_keep_rate(keep_rate, judged.keep, options)
            kept = join([carried, judged.experience.select(np.flatnonzero(judged.keep))])
    num_kept, accepted, left = len(kept or ()), kept, None
    num_rounds = math.ceil(sum(len(round_.keep) for round_ in rounds) / gen_batch_size)
    if rounds:
        about = {"step": step, "round_number": num_rounds, "num_accumulated": num_kept, "target": target}
        log_round(rounds, options, **about, last=True)
        failure = total_failure([round_.outcomes for round_ in rounds], f"step {step}", max_error_share)
        if failure and len(rounds[0].keep) >= target:  # of few groups, it may be chance
            raise SharedFailure(failure)
    outcome = "partial" if num_kept else "skipped"
    if kept is not None and num_kept >= target:
        accepted, left, outcome = kept.select(np.arange(target)), kept.select(np.arange(target, num_kept)), "full"
        filter_log.log_enough(accepted.finished.size)
    else:
        logger.info("step %d: training on %d of %d groups, %d are under way", step, num_kept, target, len(begun or ()))
    return Accepted(
        experience=accepted,
        rounds=rounds,
        num_rounds=num_rounds,
        limit=limit,
        outcome=outcome,
        target=target,
        carried_in=num_carried,
        num_stale=num_stale,
        num_skipped=next_prompt - state.next_prompt - len(numbers),
        num_requeued=0,
        num_discarded=0,
        state=StreamState(next_prompt, keep_rate, history, join([left]), begun, lowest),
        generated_tokens=sum(part.num_tokens for part in parts) - before,
        other_work=total_work(part.work for part in parts),
    )
