"""Host: what a training step finds until it has its groups (DAPO, section 3.2, algorithm 1).

A step keeps prompts under way, as many as a schedule wants (schedule.py), and takes what ends in prompt order. It
accepts the first `target` kept groups, whichever finished first (accepted.py): choosing by time would prefer prompts
with short answers. leftover=requeue starts the next step with the prompt after the last accepted one, so that the newer
policy samples surplus groups again; then the way prompts were dispatched changes the speed, never the batch. carry
keeps surplus groups for the next step, discard drops them.
"""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from dapo_jax.config.sections import FilterGroupsConfig
from dapo_jax.data.experience import Experience, comparable
from dapo_jax.data.work import Work
from dapo_jax.dynamic_sampling.prompt_stream import PromptSource, StreamState
from dapo_jax.dynamic_sampling.rounds import Round, Verdicts
from dapo_jax.dynamic_sampling.schedule import Schedule, fixed_limit
from dapo_jax.monitor import filter_log
from dapo_jax.parallel.processes import SharedFailure
from dapo_jax.rewards.verification import total_failure

logger = logging.getLogger(__name__)

FILTER = "algorithm.filter_groups"


@dataclass
class Sampled:
    """What the devices have sampled for a step, but for the groups that were judged."""

    tokens: int = 0  # drawn, also those of groups that were judged
    aborted: int = 0  # responses given up when the batch was certain
    work: Mapping[str, Work] = field(default_factory=dict)  # of sampling what is in no round
    left: Experience | None = None  # groups with responses that the next step continues


@dataclass
class Found:
    """What a step has begun and found so far.

    Args:
        target: groups per training step.
        gen_batch_size: prompts per round.
        step: training step, from 1.
        max_error_share: of verifications that may fail, see `total_failure`.
        segment_steps: training steps that the longest response takes; 0 = responses are sampled whole.
        show: gets how far the step is.

    Raises:
        RuntimeError: by `take`: too many verifications failed.
    """

    state: StreamState
    prompts: PromptSource
    options: FilterGroupsConfig
    target: int
    gen_batch_size: int
    step: int
    max_error_share: float = 1.0
    segment_steps: int = 0
    show: Callable[[str], object] = lambda text: None
    rounds: list[Verdicts] = field(default_factory=list)
    kept_groups: list[Experience] = field(default_factory=list)
    dropped_groups: list[Experience] = field(default_factory=list)  # no more than a fall-back can use
    begun: list[int] = field(default_factory=list)  # numbers of prompts
    evaluated: int = 0  # groups
    kept: int = 0  # groups of this step that the filter kept
    logged: int = 0  # of `rounds`
    adapted: float | None = None  # the limit of rounds once it has been adapted

    def __post_init__(self) -> None:
        options, state, rows = self.options, self.state, self.prompts.num_rows
        self.carried, self.num_stale = state.fresh(self.step, options.leftover_max_staleness)
        sizes = self.target, self.gen_batch_size, len(self.carried or ()), state.keep_rate
        self.schedule = Schedule(options, *sizes, self.segment_steps)
        self.cursor, self.epoch_end = state.next_prompt, math.inf
        if options.on_exhausted != "next_epoch" and not self.segment_steps:
            self.epoch_end = (state.next_prompt // rows + 1) * rows

    @property
    def certain(self) -> bool:
        """Whether nothing under way can change the batch or the next step."""
        return self.schedule.certain(self.kept)

    @property
    def num_rounds(self) -> int:
        """Rounds' worth of prompts that were judged."""
        return math.ceil(self.evaluated / self.gen_batch_size)

    @property
    def limit(self) -> float:
        """Rounds allowed."""
        return fixed_limit(self.options) if self.adapted is None else self.adapted

    @property
    def exhausted(self) -> bool:
        """Whether all prompts that the step may sample have begun."""
        return self.cursor >= self.epoch_end

    @property
    def wanted(self) -> int:
        """Prompts to begin next."""
        counts = {"kept": self.kept, "evaluated": self.evaluated, "dispatched": len(self.begun)}
        return 0 if self.exhausted else self.schedule.wanted(**counts, limit=self.limit)

    def next_prompts(self) -> list[int]:
        """The numbers of the prompts to begin now; [] if none are due."""
        history = self.state.history
        numbers, self.cursor = self.prompts.numbers(history, self.cursor, self.wanted, self.epoch_end)
        self.begun += numbers
        if numbers:
            self._show()
        return numbers

    def take(self, round_: Round, *, under_way: bool) -> None:
        """Takes the groups that can be trained on out of a round, and of the others only their outcomes.

        Args:
            under_way: whether others are still being sampled.
        """
        options = self.options
        self.rounds.append(round_.verdicts)
        self.evaluated += len(round_.keep)
        self.kept += int(round_.keep.sum())
        self._show()
        if self.evaluated >= self.target:  # enough to know, as rounds may have no limit
            self.check_verdicts()
        self.kept_groups.append(round_.experience.select(np.flatnonzero(round_.keep)))
        if options.on_limit == "fallback_unfiltered" or options.on_empty == "train_unfiltered":
            room = self.target - sum(map(len, self.dropped_groups))
            usable = ~round_.keep & comparable(round_.experience.known)
            self.dropped_groups.append(round_.experience.select(np.flatnonzero(usable)[:room]))
        self.adapted = self.schedule.adapted_limit(self.adapted, kept=self.kept, evaluated=self.evaluated)
        if self.evaluated % self.gen_batch_size == 0:
            continues = self.kept < self.schedule.missing and (under_way or self.wanted > 0)
            self.log_round(last=not continues)
            if continues and options.enable:
                self._warn_of_many_rounds()

    def check_verdicts(self) -> None:
        """Raises if too many verifications failed."""
        outcomes = [verdicts.outcomes for verdicts in self.rounds]
        if failure := total_failure(outcomes, f"step {self.step}", self.max_error_share):
            raise SharedFailure(failure)

    def log_round(self, *, last: bool) -> None:
        """Logs what was judged since the last round that was logged, if the filter is on."""
        newest, self.logged = self.rounds[self.logged :], len(self.rounds)
        if self.options.enable and newest:
            keep = np.concatenate([part.keep for part in newest])
            filter_log.log_round(
                step=self.step,
                round_number=self.num_rounds,
                num_prompts=len(keep),
                num_samples=newest[0].outcomes.lengths.shape[1],
                metric=self.options.metric,
                words=filter_log.rule_words(self.options),
                num_kept=int(keep.sum()),
                mean_std=float(np.concatenate([part.metric_std for part in newest]).mean()),
                num_accumulated=self.schedule.carried + self.kept,
                target=self.target,
                last=last,
            )

    def _show(self) -> None:
        judging = min(self.evaluated // self.gen_batch_size + 1, -(-len(self.begun) // self.gen_batch_size))
        kept = min(self.schedule.carried + self.kept, self.target)
        self.show(f"round {judging}, {kept} of {self.target} groups kept")

    def _warn_of_many_rounds(self) -> None:
        """Warns once per round, from twice the rounds that earlier steps let expect."""
        expected = self.schedule.expected_rounds
        if self.num_rounds >= 2 * expected:
            none = f"{FILTER}.max_num_gen_batches is 0"
            limit = f"the limit is {self.limit:.0f}" if math.isfinite(self.limit) else none
            numbers = self.step, self.schedule.carried + self.kept, self.target, self.num_rounds, expected
            logger.warning("step %d: %d of %d groups are kept after %d rounds, %d were expected; %s", *numbers, limit)
