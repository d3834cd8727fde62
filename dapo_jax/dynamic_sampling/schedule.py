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


def adaptive_limit(limits: Limits, *, evaluated: int, kept: int, target: int, gen_batch_size: int) -> float:
    """Rounds that a step may have after its first `adaptive_min_rounds`, from the keep rate that they have shown.

    int(target / (gen_batch_size * keep rate) + slack), with the keep rate as (kept + 0.5) / (evaluated + 1) so that
    a step without any kept group has one. It is set once: a limit that follows the rate of every further round
    would recede as fast as the rounds come.
    """
    assert limits.adaptive_slack is not None
    keep_rate = (kept + 0.5) / (evaluated + 1)
    return min(fixed_limit(limits), int(target / (gen_batch_size * keep_rate) + limits.adaptive_slack))


def wave_prompts(stream: Stream, *, kept: int, in_flight: int, keep_rate: float, target: int) -> int:
    """Prompts to dispatch now, 0 if those in flight are expected to be enough.

    Sizes are rounded up to 1, 2, 3, 4, 6, 8, 12, ...: few shapes to compile.
    """
    missing = stream.slack * (target - kept) - in_flight * keep_rate
    if kept >= target or missing <= 0:
        return 0
    return min(_rounded_up(math.ceil(missing / max(keep_rate, 1e-3))), stream.max_prompts)


def _rounded_up(count: int) -> int:
    power = 1 << (count - 1).bit_length()
    return power * 3 // 4 if power >= 4 and count <= power * 3 // 4 else power


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
