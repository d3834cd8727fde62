"""Host: which prompts a training step samples next, and when it stops: pure functions of what is known so far."""

import math
from dataclasses import dataclass

import numpy as np


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


def adaptive_limit(limits: Limits, *, evaluated: int, kept: int, missing: int, gen_batch_size: int) -> float:
    """Rounds that a step may have after its first `adaptive_min_rounds`, from the keep rate that they have shown.

    int(missing / (gen_batch_size * keep rate) + slack), where `missing` groups were to be found at the start of the
    step, with the keep rate as (kept + 0.5) / (evaluated + 1) so that a step without any kept group has one. It is
    set once: a limit that follows the rate of every further round would recede as fast as the rounds come.
    """
    assert limits.adaptive_slack is not None
    keep_rate = (kept + 0.5) / (evaluated + 1)
    return min(fixed_limit(limits), int(missing / (gen_batch_size * keep_rate) + limits.adaptive_slack))


def wave_prompts(stream: Stream, *, kept: int, in_flight: int, keep_rate: float, target: int) -> int:
    """Prompts to dispatch now, 0 if those in flight are expected to be enough.

    A wave has the largest of a few sizes that is not more than needed, so that few shapes are compiled; what it
    leaves open the next wave samples with a better estimate. Less than the smallest size waits for verdicts.
    """
    missing = stream.slack * (target - kept) - in_flight * keep_rate
    needed = missing / max(keep_rate, 1e-3)
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
