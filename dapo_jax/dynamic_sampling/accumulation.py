"""Host: sampling until a training step has its groups (DAPO, section 3.2, algorithm 1).

Accepted are the first `target` kept groups in prompt order, whatever finished first: choosing by time would prefer
prompts with short answers. With leftover=requeue the next step starts with the prompt after the last accepted one, so
that surplus groups are sampled again by the newer policy; then how prompts were dispatched changes the speed but never
the batch. carry keeps surplus groups for the next step, discard drops them.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dapo_jax.data.experience import Experience, concatenate, describe_failures, total_failure
from dapo_jax.dynamic_sampling.rounds import Round, Verdicts, filtered_counts
from dapo_jax.dynamic_sampling.schedule import (
    History,
    Limits,
    Stream,
    adaptive_limit,
    expected_rounds,
    fixed_limit,
    wave_prompts,
)
from dapo_jax.monitor import filter_log
from dapo_jax.parallel.processes import SharedFailure

logger = logging.getLogger(__name__)

FILTER = "algorithm.filter_groups"
MAX_IN_FLIGHT = 2  # waves: one is decoded while the one before is verified


@dataclass(frozen=True)
class Policies:
    """What a step does; the names are those of algorithm.filter_groups."""

    target: int  # groups
    gen_batch_size: int  # prompts per round
    limits: Limits
    on_limit: str
    on_exhausted: str
    on_empty: str
    leftover: str
    leftover_max_staleness: int  # training steps
    stream: Stream | None  # None = rounds of gen_batch_size
    keep_rate_ema: float  # weight of earlier steps in the running keep rate
    metric: str | None  # for the log; None = no filter, and nothing to log
    words: filter_log.RuleWords = filter_log.UNIFORM  # of the filter's rule

    @property
    def trains_on_dropped(self) -> bool:
        """Whether a step may fall back to groups that the filter has dropped."""
        return self.on_limit == "fallback_unfiltered" or self.on_empty == "train_unfiltered"


@dataclass(frozen=True)
class StreamState:
    """What dynamic sampling knows between two steps."""

    next_prompt: int  # first prompt number that is still to be sampled
    keep_rate: float  # running share of kept groups
    history: History
    carried: Experience | None = None  # kept groups of earlier steps, in prompt order


@dataclass(frozen=True)
class PromptSource:
    """Which row each prompt number has, and which numbers are left out."""

    row: Callable[[int], int]
    num_rows: int  # of an epoch
    skips: Callable[[History, int, int], bool] | None = None  # (history, row, number) -> left out

    def numbers(self, history: History, start: int, count: int, stop: float) -> tuple[list[int], int]:
        """The next `count` numbers below `stop` that are not left out, and the number after the last one looked at."""
        numbers, number = [], start
        while len(numbers) < count and number < stop:
            if self.skips is None or not self.skips(history, self.row(number), number):
                numbers.append(number)
            number += 1
        return numbers, number


@dataclass(frozen=True)
class Accepted:
    """What a training step trains on and what it took."""

    experience: Experience | None  # the groups; None if the step is skipped
    rounds: list[Verdicts]  # all groups that were evaluated in this step, by round or wave
    limit: float  # rounds that were allowed in the end
    outcome: str  # full | partial | fallback | unfiltered | skipped
    target: int
    carried_in: int  # groups
    num_stale: int  # carried groups that were too old
    num_skipped: int  # prompts before the next step's first that were left out for their history
    num_requeued: int  # evaluated groups that will be sampled again
    num_discarded: int  # kept groups that are dropped
    state: StreamState  # for the next step


def accumulate_groups(
    start_round: Callable[[Sequence[int]], Callable[[], Round]],
    state: StreamState,
    prompts: PromptSource,
    policies: Policies,
    *,
    step: int,
) -> Accepted:
    """Samples prompts until `policies.target` groups are kept, or until a policy ends the step.

    Args:
        start_round: samples prompts of these numbers and returns a function that waits for their verdicts.
        step: training step, from 1.

    Raises:
        RuntimeError: too few groups, and the policy says error. Says how many groups were all right and all wrong,
            and the ways out. Or the verification of every response failed.
    """
    attempt = _Attempt(start_round, state, prompts, policies, step)
    while attempt.dispatch() or attempt.in_flight:
        if policies.stream is None or len(attempt.in_flight) == MAX_IN_FLIGHT or not attempt.wants_more():
            attempt.resolve()
    return attempt.finish()


class _Attempt:
    """One step under way."""

    def __init__(self, start_round, state: StreamState, prompts: PromptSource, policies: Policies, step: int) -> None:
        self.start_round, self.state, self.prompts, self.policies, self.step = (
            start_round,
            state,
            prompts,
            policies,
            step,
        )
        self.carried, self.num_stale = _fresh(state.carried, step, policies.leftover_max_staleness)
        self.rounds: list[Verdicts] = []
        self.kept_groups: list[Experience] = []
        self.dropped_groups: list[Experience] = []  # no more than a fall-back can use
        self.in_flight: deque[tuple[int, Callable[[], Round]]] = deque()
        self.cursor, self.dispatched, self.num_rounds = state.next_prompt, 0, 0
        self.limit = fixed_limit(policies.limits)
        self.adapted: float | None = None  # the limit once it has been adapted
        self.expected_rounds = expected_rounds(
            policies.target - _size(self.carried), gen_batch_size=policies.gen_batch_size, keep_rate=state.keep_rate
        )
        self.warned_at = 0
        self.epoch_end = math.inf
        if policies.on_exhausted != "next_epoch":
            self.epoch_end = (state.next_prompt // prompts.num_rows + 1) * prompts.num_rows

    @property
    def kept(self) -> int:
        return _size(self.carried) + self.kept_now

    @property
    def evaluated(self) -> int:
        return sum(len(round_.keep) for round_ in self.rounds)

    @property
    def kept_now(self) -> int:
        """Groups kept among those that this step has evaluated."""
        return sum(int(round_.keep.sum()) for round_ in self.rounds)

    @property
    def expected_keep_rate(self) -> float:
        """Earlier steps' rate, which counts like half a batch, and this step's groups."""
        weight = 0.5 * self.policies.target
        return (self.state.keep_rate * weight + self.kept_now) / (weight + self.evaluated)

    def next_keep_rate(self) -> float:
        """The running rate after this step."""
        past = self.policies.keep_rate_ema
        now = self.kept_now / self.evaluated if self.evaluated else self.state.keep_rate
        return past * self.state.keep_rate + (1 - past) * now

    def wants_more(self) -> bool:
        return self._prompts_wanted() > 0 and self.cursor < self.epoch_end

    def _prompts_wanted(self) -> int:
        policies = self.policies
        if policies.stream is None:
            waiting = self.in_flight or self.kept >= policies.target or self.num_rounds >= self.limit
            return 0 if waiting else policies.gen_batch_size
        wanted = wave_prompts(
            policies.stream,
            kept=self.kept,
            in_flight=sum(count for count, _ in self.in_flight),
            keep_rate=self.expected_keep_rate,
            target=policies.target,
        )
        room = self.limit * policies.gen_batch_size - self.dispatched
        return int(min(wanted, max(room, 0)))

    def dispatch(self) -> bool:
        """Starts the next round or wave if there is one to start."""
        if not self.wants_more() or len(self.in_flight) == MAX_IN_FLIGHT:
            return False
        count = self._prompts_wanted()
        numbers, self.cursor = self.prompts.numbers(self.state.history, self.cursor, count, self.epoch_end)
        if not numbers:
            return False
        self.dispatched += len(numbers)
        self.num_rounds = math.ceil(self.dispatched / self.policies.gen_batch_size)
        self.in_flight.append((len(numbers), self.start_round(numbers)))
        return True

    def resolve(self) -> None:
        """Waits for the oldest round."""
        _, wait = self.in_flight.popleft()
        self._take(wait())
        policies = self.policies
        if policies.limits.adaptive_slack is not None and self.num_rounds >= policies.limits.adaptive_min_rounds:
            self.adapted = self.limit = adaptive_limit(
                policies.limits,
                before=self.adapted,
                evaluated=self.evaluated,
                kept=self.kept_now,
                missing=policies.target - _size(self.carried),
                gen_batch_size=policies.gen_batch_size,
                keep_rate=self.state.keep_rate,
            )
        if policies.metric is not None:
            ends = self.num_rounds >= self.limit or self.cursor >= self.epoch_end
            _log_round(self, last=ends and not self.in_flight)
            self._warn_of_many_rounds()

    def _take(self, round_: Round) -> None:
        """Takes the groups that can be trained on out of a round, and keeps the numbers of the others."""
        self.rounds.append(round_.verdicts)
        if self.evaluated >= self.policies.target:  # enough to know, as rounds may have no limit
            self._check_verdicts()
        self.kept_groups.append(round_.experience.select(np.flatnonzero(round_.keep)))
        if self.policies.trains_on_dropped:
            room = self.policies.target - sum(map(len, self.dropped_groups))
            self.dropped_groups.append(round_.experience.select(np.flatnonzero(~round_.keep)[:room]))

    def _check_verdicts(self) -> None:
        if failure := total_failure([round_.outcomes for round_ in self.rounds], f"step {self.step}"):
            raise SharedFailure(failure)

    def _warn_of_many_rounds(self) -> None:
        """Once a round, from twice the rounds on that earlier steps let expect."""
        rounds, full = self.evaluated // self.policies.gen_batch_size, self.kept >= self.policies.target
        goes_on = not full and (self.in_flight or self.wants_more())
        if rounds < 2 * self.expected_rounds or rounds == self.warned_at or not goes_on:
            return
        self.warned_at = rounds
        limit = f"the limit is {self.limit:.0f}" if math.isfinite(self.limit) else f"{FILTER}.max_num_gen_batches is 0"
        logger.warning(
            "step %d: %d of %d groups are kept after %d rounds, %d were expected; %s",
            self.step,
            self.kept,
            self.policies.target,
            rounds,
            self.expected_rounds,
            limit,
        )

    def finish(self) -> Accepted:
        policies = self.policies
        self._check_verdicts()
        kept = _join([self.carried, *self.kept_groups])
        if _size(kept) >= policies.target:
            assert kept is not None
            accepted, outcome = kept.select(np.arange(policies.target)), "full"
        else:
            accepted, outcome = self._too_few(kept)
        next_prompt, carried, requeued, discarded = self.cursor, None, 0, 0
        surplus = _size(kept) - policies.target
        last = int(accepted.numbers[-1]) if accepted is not None else -1
        if outcome == "full":
            assert kept is not None and accepted is not None
            if policies.metric is not None:
                filter_log.log_enough(accepted.finished.size)
            if policies.leftover == "requeue":
                next_prompt = max(last + 1, self.state.next_prompt)
                carried = self._still_carried()  # of a run that carried them before it requeued
                requeued = int(np.sum(self._numbers() > last))
            elif policies.leftover == "carry":
                carried = kept.select(np.arange(policies.target, len(kept))) if surplus else None
            else:
                discarded = surplus
        return Accepted(
            experience=accepted,
            rounds=self.rounds,
            limit=self.limit,
            outcome=outcome,
            target=policies.target,
            carried_in=_size(self.carried),
            num_stale=self.num_stale,
            num_skipped=next_prompt - self.state.next_prompt - int(np.sum(self._numbers() < next_prompt)),
            num_requeued=requeued,
            num_discarded=discarded,
            state=StreamState(next_prompt, self.next_keep_rate(), self._history(next_prompt), carried),
        )

    def _still_carried(self) -> Experience | None:
        """Groups of earlier steps that a full batch had no room for."""
        left = np.arange(self.policies.target, _size(self.carried))
        return self.carried.select(left) if self.carried is not None and left.size else None

    def _history(self, next_prompt: int) -> History:
        """With the groups before `next_prompt`: those that no schedule samples again."""
        rows = np.concatenate([round_.outcomes.rows for round_ in self.rounds] or [np.zeros(0, np.int64)])
        numbers = self._numbers()
        kept = np.concatenate([round_.keep for round_ in self.rounds] or [np.zeros(0, bool)])
        final = numbers < next_prompt
        return self.state.history.updated(rows[final], kept[final])

    def _numbers(self) -> np.ndarray:
        """Of the prompts that this step has sampled."""
        return np.concatenate([round_.outcomes.numbers for round_ in self.rounds] or [np.zeros(0, np.int64)])

    def _too_few(self, kept: Experience | None) -> tuple[Experience | None, str]:
        """What a step with fewer groups than its target trains on, and what that is called."""
        policies = self.policies
        exhausted = self.cursor >= self.epoch_end
        policy = policies.on_exhausted if exhausted else policies.on_limit
        if policy == "error":
            raise SharedFailure(_message(self, exhausted))
        dropped = _join(self.dropped_groups)
        if policy == "fallback_unfiltered":
            unfiltered = min(policies.target - _size(kept), _size(dropped))
            filled = _join([kept, dropped.select(np.arange(unfiltered))] if dropped else [kept])
            if filled is not None:
                logger.warning("step %d: %d of %d groups are unfiltered", self.step, unfiltered, len(filled))
                return filled.select(np.argsort(filled.numbers, kind="stable")), "fallback"
        elif kept is not None:
            logger.warning(
                "step %d: training on %d of %d groups (%s)",
                self.step,
                len(kept),
                policies.target,
                "the epoch is at its end" if exhausted else "the limit of rounds is reached",
            )
            return kept, "partial"
        if policies.on_empty == "error":
            raise SharedFailure(_message(self, exhausted))
        if policies.on_empty == "train_unfiltered" and dropped is not None:
            logger.warning("step %d: no group was kept, training on unfiltered ones", self.step)
            return dropped, "unfiltered"
        logger.warning("step %d: no group was kept, nothing is trained on", self.step)
        return None, "skipped"


def _fresh(carried: Experience | None, step: int, max_staleness: int) -> tuple[Experience | None, int]:
    """The carried groups that are not too old for training step `step`, and how many are."""
    if carried is None:
        return None, 0
    fresh = np.flatnonzero(step - 1 - carried.versions <= max_staleness)
    return (carried.select(fresh) if len(fresh) else None), len(carried) - len(fresh)


def _join(parts: Sequence[Experience | None]) -> Experience | None:
    present = [part for part in parts if part is not None and len(part)]
    return concatenate(present) if present else None


def _size(experience: Experience | None) -> int:
    return 0 if experience is None else len(experience)


def _log_round(attempt: _Attempt, *, last: bool) -> None:
    newest, policies = attempt.rounds[-1], attempt.policies
    assert policies.metric is not None
    filter_log.log_round(
        step=attempt.step,
        round_number=len(attempt.rounds),
        num_prompts=len(newest.keep),
        num_samples=newest.outcomes.lengths.shape[1],
        metric=policies.metric,
        words=policies.words,
        num_kept=int(newest.keep.sum()),
        mean_std=float(newest.metric_std.mean()),
        num_accumulated=attempt.kept,
        target=policies.target,
        last=last,
    )


def _message(attempt: _Attempt, exhausted: bool) -> str:
    counts, limits = filtered_counts(attempt.rounds), attempt.policies.limits
    if exhausted:
        reason, first, policy = "at the end of the epoch", "set on_exhausted=next_epoch", "on_exhausted"
    else:
        bound, option = "max_num_gen_batches", "max_num_gen_batches"
        if attempt.limit < fixed_limit(limits):
            bound, option = "adaptive_limit", "adaptive_limit.slack"
        reason = f"after {attempt.num_rounds} generation rounds ({FILTER}.{bound})"
        first, policy = f"raise {option}", "on_limit"
    last = f"{FILTER}.{policy}=partial"
    if getattr(attempt.policies, policy) == "partial":  # there is no group to train on
        last = f"{FILTER}.on_empty=skip_step"
    failed = describe_failures([round_.outcomes for round_ in attempt.rounds])
    words = attempt.policies.words
    other = "uniform otherwise" if words == filter_log.UNIFORM else f"dropped otherwise ({words.dropped})"
    return (
        f"only {attempt.kept} of data.train_batch_size={attempt.policies.target} groups kept {reason}: of "
        f"{attempt.evaluated} groups {counts['all_correct']} were all right, {counts['all_wrong']} all wrong, "
        f"{counts['other']} {other}{failed and f' ({failed})'}. "
        f"Three ways out: {first}, lower data.train_batch_size, or set {last}; or "
        "change the difficulty of the data (or raise rollout.n), so that more groups hold both right and wrong answers"
    )
