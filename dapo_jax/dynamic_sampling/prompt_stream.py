"""Host: the stream of prompts that training steps sample, and its state between steps."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from dapo_jax.config.sections import CurriculumConfig, SkipUniformConfig
from dapo_jax.data.experience import Experience
from dapo_jax.rewards.lowest import Lowest


@dataclass(frozen=True)
class History:
    """What the groups of each row of the data were like so far."""

    uniform_in_a_row: np.ndarray  # [rows] int32, the latest groups, without one that was mixed since
    mixed_rate: np.ndarray  # [rows] float32, moving average of "its group is mixed", from 1
    accuracy: np.ndarray  # [rows] float32, mean of `acc` over the latest group; NaN before the first

    @classmethod
    def empty(cls, num_rows: int) -> "History":
        nothing = np.full(num_rows, np.nan, np.float32)
        return cls(np.zeros(num_rows, np.int32), np.ones(num_rows, np.float32), nothing)

    def updated(self, rows: np.ndarray, mixed: np.ndarray, accuracy: np.ndarray, *, decay: float) -> "History":
        """The history after further groups, in prompt order; rows, mixed, accuracy [Q].

        Args:
            decay: weight of the past in a row's mixed rate.
        """
        counts, rates, latest = self.uniform_in_a_row.copy(), self.mixed_rate.copy(), self.accuracy.copy()
        for row, is_mixed in zip(rows, mixed, strict=True):
            counts[row] = 0 if is_mixed else counts[row] + 1
            rates[row] = decay * rates[row] + (1 - decay) * is_mixed
        latest[rows] = accuracy  # of a row's groups, the last
        return History(counts, rates, latest)


@dataclass(frozen=True)
class StreamState:
    """What dynamic sampling knows between two steps."""

    next_prompt: int  # first prompt number that is still to be sampled
    keep_rate: float  # running share of kept groups
    history: History
    carried: Experience | None = None  # kept groups of earlier steps, in the order in which they will be taken
    begun: Experience | None = None  # groups with responses to continue (rollout.segment_length), in prompt order
    lowest: Lowest = field(default_factory=dict)

    def fresh(self, step: int, max_staleness: int) -> tuple[Experience | None, int]:
        """The carried groups that are not too old for training step `step`, and the number of those that are."""
        if self.carried is None:
            return None, 0
        fresh = np.flatnonzero(step - 1 - self.carried.versions <= max_staleness)
        return (self.carried.select(fresh) if len(fresh) else None), len(self.carried) - len(fresh)


@dataclass(frozen=True)
class PromptSource:
    """Which row each prompt number has, and which numbers are left out as past groups of their rows were uniform."""

    row: Callable[[int], int]
    num_rows: int  # per epoch
    skip: SkipUniformConfig = SkipUniformConfig()
    curriculum: CurriculumConfig = CurriculumConfig()
    seed: int = 0

    def rates(self, history: History) -> np.ndarray | None:
        """Probability of each row of being sampled; None = 1 for all."""
        if self.skip.enable:
            return np.maximum(self.skip.decay ** history.uniform_in_a_row.astype(np.float64), self.skip.floor)
        return curriculum_rates(self.curriculum, history) if self.curriculum.enable else None

    def numbers(self, history: History, start: int, count: int, stop: float) -> tuple[list[int], int]:
        """The next `count` numbers below `stop` that are not left out, and the number after the last one examined."""
        rates, numbers, number = self.rates(history), [], start
        while len(numbers) < count and number < stop:
            if rates is None or np.random.default_rng([self.seed, 7, number]).random() < rates[self.row(number)]:
                numbers.append(number)
            number += 1
        return numbers, number


def curriculum_rates(options: CurriculumConfig, history: History) -> np.ndarray:
    """max(mixed rate, floor) of each row."""
    return np.maximum(history.mixed_rate.astype(np.float64), options.floor)


def curriculum_metrics(options: CurriculumConfig, history: History) -> dict[str, float]:
    """`curriculum/` metrics, over all rows of the data; {} if it is off."""
    if not options.enable:
        return {}
    rates, accuracy = curriculum_rates(options, history), history.accuracy
    easy, hard, new = accuracy >= 1, accuracy <= 0, np.isnan(accuracy)
    return {
        "curriculum/rate": float(np.mean(rates)),
        "curriculum/floor_share": float(np.mean(rates <= options.floor)),
        "curriculum/easy_share": float(np.mean(easy)),
        "curriculum/normal_share": float(np.mean(~(easy | hard | new))),
        "curriculum/hard_share": float(np.mean(hard)),
    }
