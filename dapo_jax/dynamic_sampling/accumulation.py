"""Host: sampling until a training step has its groups (DAPO, section 3.2, algorithm 1).

A step keeps prompts under way, as many as a plan wants (schedule.py), and takes what ends in prompt order. It accepts
the first `target` kept groups, whichever finished first: choosing by time would prefer prompts with short answers.
leftover=requeue starts the next step with the prompt after the last accepted one, so that the newer policy samples
surplus groups again; then the way prompts were dispatched changes the speed, never the batch. carry keeps surplus
groups for the next step, discard drops them.
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
from dapo_jax.dynamic_sampling.rounds import Round, Verdicts, log_round, updated_history, updated_lowest
from dapo_jax.dynamic_sampling.schedule import Plan, fixed_limit, running_keep_rate
from dapo_jax.dynamic_sampling.too_few import FILTER, Shortage, groups_despite, uses_dropped
from dapo_jax.monitor import filter_log
from dapo_jax.parallel.processes import SharedFailure
from dapo_jax.rollout.engine import GivenUp

logger = logging.getLogger(__name__)

StartRound = Callable[[Sequence[int]], Callable[[], Round]]


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
    step: int,
    max_error_share: float = 1.0,
) -> Accepted:
    """Samples prompts until `target` groups are kept, or until a policy ends the step.

    Args:
        start_round: samples prompts of these numbers and returns a function that waits for their verdicts.
        target: groups per training step.
        gen_batch_size: prompts per round.
        step: training step, from 1.
        max_error_share: of verifications that may fail, see `total_failure`.

    Raises:
        RuntimeError: too few groups, and the policy is error: the message counts the groups that were all right and
            all wrong, and names the ways out. Or too many verifications failed.
    """
    found = _Found(state, prompts, options, target, gen_batch_size, step, max_error_share)
    queue: deque[Callable[[], Round]] = deque()
    while not found.plan.certain(found.kept):
        while numbers := found.next_prompts():
            queue.append(start_round(numbers))
        if not queue:
            break
        found.take(queue.popleft()())
    return found.finish()


def expected_prompts(
    state: StreamState, options: FilterGroupsConfig, *, target: int, gen_batch_size: int, step: int
) -> int:
    """Prompts that a step is expected to have under way at once; the arguments are those of `accumulate_groups`."""
    carried, _ = state.fresh(step, options.leftover_max_staleness)
    return Plan(options, target, gen_batch_size, len(carried or ()), state.keep_rate).expected_prompts


@dataclass
class _Found:
    """What a step has begun and found so far; the first fields are the arguments of `accumulate_groups`."""

    state: StreamState
    prompts: PromptSource
    options: FilterGroupsConfig
    target: int
    gen_batch_size: int
    step: int
    max_error_share: float
    rounds: list[Verdicts] = field(default_factory=list)
    kept_groups: list[Experience] = field(default_factory=list)
    dropped_groups: list[Experience] = field(default_factory=list)  # no more than a fall-back can use
    dispatched: int = 0  # prompts
    evaluated: int = 0  # groups
    kept: int = 0  # groups of this step that the filter kept
    logged: int = 0  # of `rounds`
    adapted: float | None = None  # the limit of rounds once it has been adapted

    def __post_init__(self) -> None:
        options, state = self.options, self.state
        self.carried, self.num_stale = state.fresh(self.step, options.leftover_max_staleness)
        num_carried = len(self.carried or ())
        self.plan = Plan(options, self.target, self.gen_batch_size, num_carried, state.keep_rate)
        self.cursor = state.next_prompt
        self.epoch_end = math.inf
        if options.on_exhausted != "next_epoch":
            self.epoch_end = (state.next_prompt // self.prompts.num_rows + 1) * self.prompts.num_rows

    @property
    def num_rounds(self) -> int:
        return math.ceil(self.evaluated / self.gen_batch_size)

    @property
    def limit(self) -> float:
        return fixed_limit(self.options) if self.adapted is None else self.adapted

    def wanted(self) -> int:
        """Prompts to begin next."""
        return self.plan.wanted(
            kept=self.kept, evaluated=self.evaluated, dispatched=self.dispatched, limit=self.limit
        ) * (self.cursor < self.epoch_end)

    def next_prompts(self) -> list[int]:
        """The numbers of the prompts to begin now; [] if none are due."""
        history = self.state.history
        numbers, self.cursor = self.prompts.numbers(history, self.cursor, self.wanted(), self.epoch_end)
        self.dispatched += len(numbers)
        return numbers

    def take(self, round_: Round) -> None:
        """Takes the groups that can be trained on out of a round, and of the others only their outcomes."""
        self.rounds.append(round_.verdicts)
        self.evaluated += len(round_.keep)
        self.kept += int(round_.keep.sum())
        if self.evaluated >= self.target:  # enough to know, as rounds may have no limit
            self._check_verdicts()
        self.kept_groups.append(round_.experience.select(np.flatnonzero(round_.keep)))
        if uses_dropped(self.options):
            room = self.target - sum(map(len, self.dropped_groups))
            usable = ~round_.keep & comparable(round_.experience.known)
            self.dropped_groups.append(round_.experience.select(np.flatnonzero(usable)[:room]))
        self.adapted = self.plan.adapted_limit(self.adapted, kept=self.kept, evaluated=self.evaluated)
        if self.evaluated % self.gen_batch_size == 0:
            self._log_round()
            self._warn_of_many_rounds()

    def _check_verdicts(self) -> None:
        outcomes = [round_.outcomes for round_ in self.rounds]
        if failure := total_failure(outcomes, f"step {self.step}", self.max_error_share):
            raise SharedFailure(failure)

    def _continues(self) -> bool:
        """Whether groups are missing, and prompts are under way or may be begun."""
        return self.kept < self.plan.missing and (self.evaluated < self.dispatched or self.wanted() > 0)

    def _log_round(self) -> None:
        """Logs what was judged since the last round that was logged, if the filter is on."""
        newest, self.logged = self.rounds[self.logged :], len(self.rounds)
        if self.options.enable and newest:
            log_round(
                newest,
                self.options,
                step=self.step,
                round_number=self.num_rounds,
                num_accumulated=self.plan.carried + self.kept,
                target=self.target,
                last=not self._continues(),
            )

    def _warn_of_many_rounds(self) -> None:
        """Warns once per round, from twice the rounds that earlier steps let expect."""
        if self.num_rounds < 2 * self.plan.expected_rounds or not (self.options.enable and self._continues()):
            return
        limit = f"the limit is {self.limit:.0f}" if math.isfinite(self.limit) else f"{FILTER}.max_num_gen_batches is 0"
        numbers = self.step, self.plan.carried + self.kept, self.target, self.num_rounds, self.plan.expected_rounds
        logger.warning("step %d: %d of %d groups are kept after %d rounds, %d were expected; %s", *numbers, limit)

    def finish(self) -> Accepted:
        """Chooses the groups to train on, and what becomes of the others."""
        self._log_round()
        self._check_verdicts()
        kept = join([self.carried, *self.kept_groups])
        next_prompt, carried, discarded = self.cursor, None, 0
        if kept is None or len(kept) < self.target:
            dropped, exhausted = join(self.dropped_groups), self.cursor >= self.epoch_end
            found = self.step, self.target, kept, dropped, self.rounds, self.num_rounds, self.limit, exhausted
            accepted, outcome = groups_despite(Shortage(*found), self.options)
        else:
            accepted, outcome = kept.select(np.arange(self.target)), "full"
            if self.options.enable:
                filter_log.log_enough(accepted.finished.size)
            left = {"carry": len(kept), "requeue": self.plan.carried}.get(self.options.leftover, 0)
            carried = join([kept.select(np.arange(self.target, left))])
            if self.options.leftover == "requeue":
                next_prompt = max(int(accepted.numbers[-1]) + 1, self.state.next_prompt)
            elif self.options.leftover == "discard":
                discarded = len(kept) - self.target
        numbers = np.concatenate([round_.outcomes.numbers for round_ in self.rounds] or [np.zeros(0, np.int64)])
        keep = np.concatenate([round_.keep for round_ in self.rounds] or [np.zeros(0, bool)])
        keep_rate = running_keep_rate(self.state.keep_rate, keep, self.options)
        history, lowest = self._history(next_prompt)
        return Accepted(
            experience=accepted,
            rounds=self.rounds,
            num_rounds=self.num_rounds,
            limit=self.limit,
            outcome=outcome,
            target=self.target,
            carried_in=self.plan.carried,
            num_stale=self.num_stale,
            num_skipped=next_prompt - self.state.next_prompt - int(np.sum(numbers < next_prompt)),
            num_requeued=int(np.sum(numbers >= next_prompt)),
            num_discarded=discarded,
            state=StreamState(next_prompt, keep_rate, history, carried, lowest=lowest),
            generated_tokens=sum(int(round_.outcomes.lengths.sum()) for round_ in self.rounds),
        )

    def _history(self, next_prompt: int) -> tuple[History, dict[str, float]]:
        """History and lowest numbers after the groups before `next_prompt`, which no schedule samples again."""
        history, lowest = self.state.history, dict(self.state.lowest)
        for round_ in self.rounds:
            final = round_.outcomes.numbers < next_prompt
            history = updated_history(history, round_, self.options, decay=self.prompts.decay, final=final)
            lowest = updated_lowest(lowest, round_, final)
        return history, lowest
