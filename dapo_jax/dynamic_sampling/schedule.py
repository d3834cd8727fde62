"""Host: which prompts a training step samples next, and when it stops: pure functions of what is known so far."""

import math
from dataclasses import dataclass

import numpy as np

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
    limits: Limits, *, evaluated: int, kept: int, missing: int, gen_batch_size: int, keep_rate: float
) -> float:
    """Rounds that a step may have, as its first rounds (`adaptive_min_rounds` or more) let expect.

    int(missing / (gen_batch_size * seen rate) + slack), where `missing` groups were to be found at the start of the
    step and the seen rate is (kept + 0.5) / (evaluated + 1). While no group has been kept, at most the rounds in which
    a tenth of the running `keep_rate` would have shown one in 999 of 1000 cases, plus slack.

    The step takes the least of all its rounds' limits: one that followed the rate up and down would recede as fast as
    rounds without kept groups come.
    """
    assert limits.adaptive_slack is not None
    needed = missing * (evaluated + 1) / (gen_batch_size * (kept + 0.5))
    if kept == 0:
        needed = min(needed, 10 * math.log(1000) / (gen_batch_size * max(keep_rate, MIN_KEEP_RATE)))
    return min(fixed_limit(limits), int(needed + limits.adaptive_slack))


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
