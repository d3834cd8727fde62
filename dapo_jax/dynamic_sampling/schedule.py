"""Host: which prompts a training step samples next, and when it stops: pure functions of what is known so far."""

import math
from dataclasses import dataclass

import numpy as np

Z = 3.09  # standard deviations: one case in 1000 lies further below
MIN_KEEP_RATE = 1e-3  # assumed at least, so that a step in which nothing is kept expects an end


@dataclass(frozen=True)
class Limits:
    """What bounds the rounds of a step."""

    max_num_gen_batches: int  # 0 or less = no limit
    adaptive_slack: float | None  # rounds more than the filter rate lets expect; None = not adaptive
    adaptive_min_rounds: int


@dataclass(frozen=True)
class Stream:
    """How waves are sized when the keep rate predicts the need."""

    slack: float
    max_prompts: int  # of a wave


def fixed_limit(limits: Limits) -> float:
    """Rounds that a step may have whatever it sees."""
    return limits.max_num_gen_batches if limits.max_num_gen_batches > 0 else math.inf


def adaptive_limit(
    limits: Limits,
    *,
    before: float | None,
    evaluated: int,
    kept: int,
    missing: int,
    gen_batch_size: int,
    keep_rate: float,
) -> float:
    """Rounds that a step may have, from the share of groups that it has kept so far.

    After `adaptive_min_rounds` rounds it is int(missing / (gen_batch_size * rate) + slack), where `missing` groups
    were to be found at the start of the step and the rate is (kept + 0.5) / (evaluated + 1). Later rounds can only
    lower it: to the same with the lower end of Wilson's interval (Z standard deviations) as the rate, so that chance
    does not. While no group has been kept, it is at most the rounds in which a tenth of the running `keep_rate` would
    have shown one in 999 of 1000 cases, plus slack.

    A limit that followed the rate up and down would recede as fast as rounds without kept groups come.

    Args:
        before: the limit after the round before; None = this round is the first that sets it.
        keep_rate: of earlier steps.
    """
    assert limits.adaptive_slack is not None
    bounds = []  # of the rounds that are needed
    if kept == 0:
        bounds.append(10 * math.log(1000) / (gen_batch_size * max(keep_rate, MIN_KEEP_RATE)))
    if before is None:
        before = fixed_limit(limits)
        bounds.append(missing * (evaluated + 1) / (gen_batch_size * (kept + 0.5)))
    elif kept:
        bounds.append(missing / (gen_batch_size * _lower_end(kept, evaluated)))
    return min(before, int(min(bounds) + limits.adaptive_slack))


def _lower_end(kept: int, evaluated: int) -> float:
    """Of Wilson's interval for the share of which `kept` of `evaluated` is a sample (Wilson, 1927)."""
    share, spread = kept / evaluated, Z**2 / evaluated
    middle = share + spread / 2
    return (middle - math.sqrt(spread * share * (1 - share) + spread**2 / 4)) / (1 + spread)


def expected_rounds(missing: int, *, gen_batch_size: int, keep_rate: float) -> int:
    """Rounds that find `missing` groups if each prompt is kept at the running `keep_rate`."""
    return math.ceil(missing / (gen_batch_size * max(keep_rate, MIN_KEEP_RATE)))


def wave_prompts(stream: Stream, *, kept: int, in_flight: int, keep_rate: float, target: int) -> int:
    """Prompts to dispatch now, 0 if those in flight are expected to be enough.

    A wave has the largest of a few sizes that is not more than needed, so that few shapes are compiled; what it
    leaves open the next wave samples with a better estimate. Less than the smallest size waits for verdicts.
    """
    missing = stream.slack * (target - kept) - in_flight * keep_rate
    needed = missing / max(keep_rate, MIN_KEEP_RATE)
    smallest, *larger = wave_sizes(stream.max_prompts, target)
    if kept >= target or needed <= 0 or (in_flight and needed < smallest):
        return 0
    return max([smallest, *(size for size in larger if size <= needed)])


def wave_sizes(max_prompts: int, target: int) -> list[int]:
    """The sizes that a wave may have, ascending: max_prompts, 3/4 of it, and halves down to an eighth of it or to
    half the target, whichever is less."""
    sizes, size = {max_prompts, max(max_prompts * 3 // 4, 1)}, max_prompts
    while size > max(min(max_prompts // 8, target // 2), 1):
        size //= 2
        sizes.add(size)
    return sorted(sizes)


class History:
    """How many groups in a row of each row of the data were uniform."""

    def __init__(self, uniform_in_a_row: np.ndarray) -> None:
        self.uniform_in_a_row = uniform_in_a_row  # [rows] int32

    @classmethod
    def empty(cls, num_rows: int) -> "History":
        return cls(np.zeros(num_rows, np.int32))

    def updated(self, rows: np.ndarray, kept: np.ndarray) -> "History":
        """With further groups, in prompt order."""
        counts = self.uniform_in_a_row.copy()
        for row, keep in zip(rows, kept, strict=True):
            counts[row] = 0 if keep else counts[row] + 1
        return History(counts)

    def skips(self, row: int, number: int, *, seed: int, floor: float, decay: float) -> bool:
        """Whether prompt `number` is left out: by a draw that only (seed, number) address."""
        count = int(self.uniform_in_a_row[row])
        if count == 0:
            return False
        draw = np.random.default_rng([seed, 7, number]).random()
        return bool(draw >= max(decay**count, floor))
