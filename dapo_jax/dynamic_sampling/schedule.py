"""Host: how many prompts a training step samples next, and when it stops: pure functions of what is known so far."""

import math
from dataclasses import dataclass

from dapo_jax.config.sections import FilterGroupsConfig

Z = 3.09  # standard deviations: one case in 1000 is further below
SURE = 2.0  # standard deviations: 97 of 100 cases are not further below
MIN_KEEP_RATE = 1e-3  # assumed at least, so that a step that keeps nothing expects an end


def fixed_limit(options: FilterGroupsConfig) -> float:
    """Rounds that a step may have, whatever it sees."""
    return options.max_num_gen_batches if options.max_num_gen_batches > 0 else math.inf


def _lower_end(kept: int, evaluated: int) -> float:
    """Of Wilson's interval for the share of which `kept` of `evaluated` is a sample (Wilson, 1927)."""
    share, spread = kept / evaluated, Z**2 / evaluated
    middle = share + spread / 2
    return (middle - math.sqrt(spread * share * (1 - share) + spread**2 / 4)) / (1 + spread)


@dataclass(frozen=True)
class Schedule:
    """What a step samples next; fixed when it begins, but for what it has found so far."""

    options: FilterGroupsConfig
    target: int  # groups per training step
    gen_batch_size: int  # prompts per round
    carried: int  # groups of earlier steps that this one will use
    keep_rate: float  # of earlier steps
    segment_steps: int = 0  # training steps that the longest response takes; 0 = responses are sampled whole

    @property
    def streams(self) -> bool:
        """Whether prompts are one queue instead of rounds; without a filter one round is enough."""
        return self.options.enable and self.options.backfill == "stream"

    @property
    def missing(self) -> int:
        """Groups to find."""
        return self.target - self.carried

    @property
    def expected_rounds(self) -> int:
        """Rounds that find the missing groups at the running keep rate."""
        return math.ceil(self.missing / (self.gen_batch_size * max(self.keep_rate, MIN_KEEP_RATE)))

    @property
    def expected_prompts(self) -> int:
        """Prompts that are expected to be under way at once."""
        if not self.streams:
            return self.gen_batch_size
        queued = queued_prompts(self.options.stream.slack * self.missing, keep_rate=self.keep_rate)
        return max(math.ceil(min(queued, fixed_limit(self.options) * self.gen_batch_size)), 1)

    @property
    def groups_to_begin(self) -> int:
        """Prompts that a step of partial rollouts begins: what it trains on, and a stock of carried groups.

        The stock is sqrt(target) groups, about one standard deviation of what a step may lack. Groups end up to
        segment_steps - 1 steps after they are begun, so a step corrects the stock by one part in segment_steps: more
        would let it swing. The result is in whole quarters of gen_batch_size, so that few sizes are compiled.
        """
        correction = (math.sqrt(self.target) - self.carried) / self.segment_steps
        wanted = (self.target + correction) / max(self.keep_rate, MIN_KEEP_RATE)
        quarter = max(self.gen_batch_size // 4, 1)
        return max(round(wanted / quarter), 0) * quarter

    def certain(self, kept: int) -> bool:
        """Whether nothing under way can change the batch or the next step; `kept` groups were found."""
        return self.streams and self.options.leftover == "requeue" and kept >= self.missing

    def wanted(self, *, kept: int, evaluated: int, dispatched: int, limit: float) -> int:
        """Prompts to begin next, 0 if those under way are expected to be enough or the limit is reached.

        In a stream they are a block, which is judged together; no block is part of two rounds.

        Args:
            kept, evaluated: groups found and judged in this step.
            dispatched: prompts begun in this step.
            limit: rounds allowed.
        """
        if self.segment_steps:
            return 0 if dispatched else int(min(self.groups_to_begin, limit * self.gen_batch_size))
        missing, under_way = self.missing - kept, dispatched - evaluated
        if missing <= 0 or dispatched >= limit * self.gen_batch_size:
            return 0
        if not self.streams:
            return 0 if under_way else self.gen_batch_size
        weight = 0.5 * self.target  # of earlier steps' rate, against this step's groups
        rate = (self.keep_rate * weight + kept) / (weight + evaluated)
        if queued_prompts(self.options.stream.slack * missing, keep_rate=rate) <= under_way:
            return 0
        return min(block_size(self.target), self.gen_batch_size - dispatched % self.gen_batch_size)

    def adapted_limit(self, before: float | None, *, kept: int, evaluated: int) -> float | None:
        """Rounds that a step may have, from the share of groups that it has kept so far; None = not adapted (yet).

        After `adaptive_limit.min_rounds` rounds it is int(missing / (gen_batch_size * rate) + slack) with the rate
        (kept + 0.5) / (evaluated + 1). Later rounds can only lower it, to the same formula with the lower end of
        Wilson's interval (Z standard deviations) as the rate, so that chance alone does not. While no group has been
        kept, it is at most the rounds in which a tenth of the running `keep_rate` would have shown one in 999 of 1000
        cases, plus slack.

        A limit that followed the rate up and down would recede as fast as rounds without kept groups come.

        Args:
            before: what this returned last; None at first.
            kept, evaluated: groups found and judged in this step.
        """
        adaptive, bounds = self.options.adaptive_limit, []  # on the rounds needed
        if not adaptive.enable or evaluated < adaptive.min_rounds * self.gen_batch_size:
            return before
        if kept == 0:
            bounds.append(10 * math.log(1000) / (self.gen_batch_size * max(self.keep_rate, MIN_KEEP_RATE)))
        if before is None:
            before = fixed_limit(self.options)
            bounds.append(self.missing * (evaluated + 1) / (self.gen_batch_size * (kept + 0.5)))
        elif kept:
            bounds.append(self.missing / (self.gen_batch_size * _lower_end(kept, evaluated)))
        return min(before, int(min(bounds) + adaptive.slack))

    def keep_rate_after(self, *, kept: int, evaluated: int) -> float:
        """The running share of kept groups after this step."""
        past = self.options.stream.keep_rate_ema
        return past * self.keep_rate + (1 - past) * (kept / evaluated) if evaluated else self.keep_rate


def queued_prompts(missing: float, *, keep_rate: float) -> float:
    """Prompts that a queue should hold: so many that `missing` groups are kept in 97 of 100 cases.

    The last of them wait until slots are free, and are given up when they turn out not to be needed.
    """
    if missing <= 0:
        return 0.0
    rate = max(keep_rate, MIN_KEEP_RATE)
    # the larger root of: prompts * rate - SURE * (prompts * rate * (1 - rate))^(1/2) = missing
    spread = SURE * math.sqrt(rate * (1 - rate))
    root = (spread + math.sqrt(spread**2 + 4 * rate * missing)) / (2 * rate)
    return root**2


def block_size(target: int) -> int:
    """Prompts of a queue that are judged together: few, so that the first verdicts come early."""
    return max(target // 8, 1)
