"""Host: sampling until a training step has its groups (DAPO, section 3.2, algorithm 1).

A step accepts the first `target` kept groups in prompt order, whichever finished first: choosing by time would prefer
prompts with short answers. leftover=requeue starts the next step with the prompt after the last accepted one, so that
the newer policy samples surplus groups again; then the way prompts were dispatched changes the speed, never the batch.
carry keeps surplus groups for the next step, discard drops them.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from dapo_jax.config.sections import FilterGroupsConfig
from dapo_jax.data.experience import Experience, comparable, join, total_failure
from dapo_jax.data.work import Work
from dapo_jax.dynamic_sampling.prompt_stream import History, PromptSource, StreamState
from dapo_jax.dynamic_sampling.rounds import Round, Verdicts, log_newest, updated_history, updated_lowest
from dapo_jax.dynamic_sampling.schedule import (
    adaptive_limit,
    block_size,
    expected_rounds,
    fixed_limit,
    queued_prompts,
    running_keep_rate,
    wave_prompts,
)
from dapo_jax.dynamic_sampling.too_few import FILTER, Shortage, groups_despite, uses_dropped
from dapo_jax.monitor import filter_log
from dapo_jax.parallel.processes import SharedFailure
from dapo_jax.rollout.engine import GivenUp

logger = logging.getLogger(__name__)

MAX_IN_FLIGHT = 2  # waves: one is decoded while the previous one is verified
StartRound = Callable[[Sequence[int]], Callable[[], Round]]


@dataclass(frozen=True)
class Accepted:
    """What a training step trains on, and what finding it took."""

    experience: Experience | None  # the groups; None if the step is skipped, or the data solved
    rounds: list[Verdicts]  # all groups evaluated in this step, by round or wave
    limit: float  # rounds allowed in the end
    outcome: str  # full | partial | fallback | unfiltered | skipped | solved
    target: int
    carried_in: int  # groups
    num_stale: int  # carried groups that were too old
    num_skipped: int  # prompts before the next step's first that their history left out
    num_requeued: int  # evaluated groups that will be sampled again
    num_discarded: int  # kept groups that are dropped
    state: StreamState  # for the next step
    generated_tokens: int  # drawn in this step
    num_aborted: int = 0  # responses given up when the batch was certain
    other_work: Mapping[str, Work] = field(default_factory=dict)  # of sampling what is in no round

    def with_given_up(self, given_up: GivenUp) -> "Accepted":
        """The same with what was being sampled when the batch was certain."""
        tokens = self.generated_tokens + given_up.tokens
        return replace(self, generated_tokens=tokens, num_aborted=given_up.responses, other_work=given_up.work)


def accumulate_groups(
    start_round: StartRound,
    state: StreamState,
    prompts: PromptSource,
    options: FilterGroupsConfig,
    *,
    target: int,
    gen_batch_size: int,
    max_wave: int,
    step: int,
    overlaps: bool = False,
    max_error_share: float = 1.0,
) -> Accepted:
    """Samples prompts until `target` groups are kept, or until a policy ends the step.

    Args:
        start_round: samples prompts of these numbers and returns a function that waits for their verdicts.
        target: groups per training step.
        gen_batch_size: prompts per round.
        max_wave: prompts of a wave, with backfill=stream.
        step: training step, from 1.
        overlaps: rounds are decoded while earlier ones are waited for. A stream then is one queue that never runs
            empty, and with leftover=requeue the step ends as soon as its batch is certain.
        max_error_share: of verifications that may fail, see `total_failure`.

    Raises:
        RuntimeError: too few groups, and the policy is error: the message counts the groups that were all right and
            all wrong, and names the ways out. Or too many verifications failed.
    """
    attempt = _Attempt(
        start_round, state, prompts, options, target, gen_batch_size, max_wave, step, overlaps, max_error_share
    )
    while not attempt.is_certain() and (attempt.dispatch() or attempt.in_flight):
        if not attempt.streams or attempt.is_full() or not attempt.wants_more():
            attempt.resolve()
    return attempt.finish()


def expected_prompts(
    state: StreamState, options: FilterGroupsConfig, *, target: int, gen_batch_size: int, step: int
) -> int:
    """Prompts that a step is expected to have under way at once, if the engine overlaps rounds.

    Args:
        target, gen_batch_size, step: as for `accumulate_groups`.
    """
    if not (options.enable and options.backfill == "stream"):
        return gen_batch_size
    carried, _ = state.fresh(step, options.leftover_max_staleness)
    queued = queued_prompts(options.stream.slack * (target - len(carried or ())), keep_rate=state.keep_rate)
    return max(math.ceil(min(queued, fixed_limit(options) * gen_batch_size)), 1)


@dataclass
class _Attempt:
    """One step under way; the first fields are the arguments of `accumulate_groups`."""

    start_round: StartRound
    state: StreamState
    prompts: PromptSource
    options: FilterGroupsConfig
    target: int
    gen_batch_size: int
    max_wave: int
    step: int
    overlaps: bool
    max_error_share: float
    rounds: list[Verdicts] = field(default_factory=list)
    kept_groups: list[Experience] = field(default_factory=list)
    dropped_groups: list[Experience] = field(default_factory=list)  # no more than a fall-back can use
    in_flight: deque[tuple[int, Callable[[], Round]]] = field(default_factory=deque)  # (prompts, wait)
    dispatched: int = 0  # prompts
    num_rounds: int = 0
    adapted: float | None = None  # the limit once it has been adapted
    warned_at: int = 0  # rounds

    def __post_init__(self) -> None:
        options, state = self.options, self.state
        self.streams = options.enable and options.backfill == "stream"  # without a filter one round is enough
        self.carried, self.num_stale = state.fresh(self.step, options.leftover_max_staleness)
        self.missing = self.target - len(self.carried or ())  # groups to find
        self.cursor = state.next_prompt
        self.limit = fixed_limit(options)
        self.expected_rounds = expected_rounds(
            self.missing, gen_batch_size=self.gen_batch_size, keep_rate=state.keep_rate
        )
        self.epoch_end = math.inf
        if options.on_exhausted != "next_epoch":
            self.epoch_end = (state.next_prompt // self.prompts.num_rows + 1) * self.prompts.num_rows

    @property
    def kept(self) -> int:
        return len(self.carried or ()) + self.kept_now

    @property
    def evaluated(self) -> int:
        return sum(len(round_.keep) for round_ in self.rounds)

    @property
    def kept_now(self) -> int:
        """Groups of this step that the filter kept."""
        return sum(int(round_.keep.sum()) for round_ in self.rounds)

    @property
    def expected_keep_rate(self) -> float:
        """Earlier steps' rate, with the weight of half a batch, and this step's groups."""
        weight = 0.5 * self.target
        return (self.state.keep_rate * weight + self.kept_now) / (weight + self.evaluated)

    def is_certain(self) -> bool:
        """Whether nothing under way can change the batch or the next step, and it costs time to wait for."""
        return self.overlaps and self.streams and self.options.leftover == "requeue" and self.kept >= self.target

    def is_full(self) -> bool:
        """Whether no more waves may be under way: engines that do not overlap have decoded all of them."""
        return not self.overlaps and len(self.in_flight) == MAX_IN_FLIGHT

    def wants_more(self) -> bool:
        return self._prompts_wanted() > 0 and self.cursor < self.epoch_end

    def _prompts_wanted(self) -> int:
        if not self.streams:
            waiting = self.in_flight or self.kept >= self.target or self.num_rounds >= self.limit
            return 0 if waiting else self.gen_batch_size
        under_way, rate = sum(count for count, _ in self.in_flight), self.expected_keep_rate
        missing = self.options.stream.slack * (self.target - self.kept)
        if self.overlaps:
            block = block_size(self.target)
            wanted = block if queued_prompts(missing, keep_rate=rate) > under_way else 0
        else:
            wanted = wave_prompts(
                missing, in_flight=under_way, keep_rate=rate, max_prompts=self.max_wave, target=self.target
            )
        room = self.limit * self.gen_batch_size - self.dispatched
        return int(min(wanted, max(room, 0)))

    def dispatch(self) -> bool:
        """Starts the next round or wave, if one is due."""
        if not self.wants_more() or self.is_full():
            return False
        count = self._prompts_wanted()
        numbers, self.cursor = self.prompts.numbers(self.state.history, self.cursor, count, self.epoch_end)
        if not numbers:
            return False
        self.dispatched += len(numbers)
        self.num_rounds = math.ceil(self.dispatched / self.gen_batch_size)
        self.in_flight.append((len(numbers), self.start_round(numbers)))
        return True

    def resolve(self) -> None:
        """Waits for the oldest round."""
        _, wait = self.in_flight.popleft()
        self._take(wait())
        adaptive = self.options.adaptive_limit
        seen = self.evaluated / self.gen_batch_size if self.overlaps else self.num_rounds
        if adaptive.enable and seen >= adaptive.min_rounds:
            self.adapted = self.limit = adaptive_limit(
                self.options,
                before=self.adapted,
                evaluated=self.evaluated,
                kept=self.kept_now,
                missing=self.missing,
                gen_batch_size=self.gen_batch_size,
                keep_rate=self.state.keep_rate,
            )
        if self.options.enable:
            ends = not self.in_flight and (self.num_rounds >= self.limit or self.cursor >= self.epoch_end)
            log_newest(
                self.rounds, self.options, step=self.step, num_accumulated=self.kept, target=self.target, last=ends
            )
            self._warn_of_many_rounds()

    def _take(self, round_: Round) -> None:
        """Takes the groups that can be trained on out of a round, and of the others only their outcomes."""
        self.rounds.append(round_.verdicts)
        if self.evaluated >= self.target:  # enough to know, as rounds may have no limit
            self._check_verdicts()
        self.kept_groups.append(round_.experience.select(np.flatnonzero(round_.keep)))
        if uses_dropped(self.options):
            room = self.target - sum(map(len, self.dropped_groups))
            usable = ~round_.keep & comparable(round_.experience.known)
            self.dropped_groups.append(round_.experience.select(np.flatnonzero(usable)[:room]))

    def _check_verdicts(self) -> None:
        outcomes = [round_.outcomes for round_ in self.rounds]
        if failure := total_failure(outcomes, f"step {self.step}", self.max_error_share):
            raise SharedFailure(failure)

    def _warn_of_many_rounds(self) -> None:
        """Warns once per round, from twice the rounds that earlier steps let expect."""
        rounds, full = self.evaluated // self.gen_batch_size, self.kept >= self.target
        continues = not full and (self.in_flight or self.wants_more())
        if rounds < 2 * self.expected_rounds or rounds == self.warned_at or not continues:
            return
        self.warned_at = rounds
        limit = f"the limit is {self.limit:.0f}" if math.isfinite(self.limit) else f"{FILTER}.max_num_gen_batches is 0"
        logger.warning(
            "step %d: %d of %d groups are kept after %d rounds, %d were expected; %s",
            self.step,
            self.kept,
            self.target,
            rounds,
            self.expected_rounds,
            limit,
        )

    def finish(self) -> Accepted:
        """Chooses the groups to train on, and what becomes of the others."""
        self._check_verdicts()
        kept = join([self.carried, *self.kept_groups])
        next_prompt, carried, requeued, discarded = self.cursor, None, 0, 0
        if kept is None or len(kept) < self.target:
            accepted, outcome = groups_despite(self._shortage(kept), self.options)
        else:
            accepted, outcome = kept.select(np.arange(self.target)), "full"
            surplus = np.arange(self.target, len(kept))
            if self.options.enable:
                filter_log.log_enough(accepted.finished.size)
            if self.options.leftover == "requeue":
                last = int(accepted.numbers[-1])
                next_prompt = max(last + 1, self.state.next_prompt)
                carried = self._still_carried()
                requeued = int(np.sum(self._numbers() > last))
            elif self.options.leftover == "carry":
                carried = kept.select(surplus) if surplus.size else None
            else:
                discarded = surplus.size
        keep_rate = running_keep_rate(self.state.keep_rate, self._keep(), self.options)
        history, lowest = self._history(next_prompt)
        return Accepted(
            experience=accepted,
            rounds=self.rounds,
            limit=self.limit,
            outcome=outcome,
            target=self.target,
            carried_in=len(self.carried or ()),
            num_stale=self.num_stale,
            num_skipped=next_prompt - self.state.next_prompt - int(np.sum(self._numbers() < next_prompt)),
            num_requeued=requeued,
            num_discarded=discarded,
            state=StreamState(next_prompt, keep_rate, history, carried, lowest=lowest),
            generated_tokens=sum(int(round_.outcomes.lengths.sum()) for round_ in self.rounds),
        )

    def _shortage(self, kept: Experience | None) -> Shortage:
        return Shortage(
            step=self.step,
            target=self.target,
            kept=kept,
            dropped=join(self.dropped_groups),
            rounds=self.rounds,
            num_rounds=self.num_rounds,
            limit=self.limit,
            exhausted=self.cursor >= self.epoch_end,
        )

    def _still_carried(self) -> Experience | None:
        """Groups that earlier steps carried, before the run requeued, and a full batch had no room for."""
        left = np.arange(self.target, len(self.carried or ()))
        return self.carried.select(left) if self.carried is not None and left.size else None

    def _history(self, next_prompt: int) -> tuple[History, dict[str, float]]:
        """History and lowest numbers after the groups before `next_prompt`, which no schedule samples again."""
        history, lowest = self.state.history, dict(self.state.lowest)
        for round_ in self.rounds:
            final = round_.outcomes.numbers < next_prompt
            history = updated_history(history, round_, self.options, decay=self.prompts.decay, final=final)
            lowest = updated_lowest(lowest, round_, final)
        return history, lowest

    def _keep(self) -> np.ndarray:
        """Whether the filter kept the group of each of `_numbers`."""
        return np.concatenate([round_.keep for round_ in self.rounds] or [np.zeros(0, bool)])

    def _numbers(self) -> np.ndarray:
        """Numbers of the prompts that this step has sampled."""
        return np.concatenate([round_.outcomes.numbers for round_ in self.rounds] or [np.zeros(0, np.int64)])
