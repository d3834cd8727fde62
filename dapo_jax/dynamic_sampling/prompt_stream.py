"""Host: the stream of prompts that training steps sample, and its state between steps."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dapo_jax.config.sections import SkipUniformConfig
from dapo_jax.data.experience import Experience
from dapo_jax.data.order import PromptOrder


class History:
    """How many of the latest groups of each row of the data were uniform, without one that was kept since."""

    def __init__(self, uniform_in_a_row: np.ndarray) -> None:
        self.uniform_in_a_row = uniform_in_a_row  # [rows] int32

    @classmethod
    def empty(cls, num_rows: int) -> "History":
        return cls(np.zeros(num_rows, np.int32))

    def updated(self, rows: np.ndarray, kept: np.ndarray) -> "History":
        """The history after further groups, in prompt order."""
        counts = self.uniform_in_a_row.copy()
        for row, keep in zip(rows, kept, strict=True):
            counts[row] = 0 if keep else counts[row] + 1
        return History(counts)

    def skips(self, row: int, number: int, *, seed: int, floor: float, decay: float) -> bool:
        """Whether prompt `number` is left out, by a draw whose address is (seed, number)."""
        count = int(self.uniform_in_a_row[row])
        if count == 0:
            return False
        draw = np.random.default_rng([seed, 7, number]).random()
        return bool(draw >= max(decay**count, floor))


@dataclass(frozen=True)
class StreamState:
    """What dynamic sampling knows between two steps."""

    next_prompt: int  # first prompt number that is still to be sampled
    keep_rate: float  # running share of kept groups
    history: History
    carried: Experience | None = None  # kept groups of earlier steps, in the order in which they will be taken
    begun: Experience | None = None  # groups with responses to continue (rollout.segment_length), in prompt order

    def fresh(self, step: int, max_staleness: int) -> tuple[Experience | None, int]:
        """The carried groups that are not too old for training step `step`, and the number of those that are."""
        if self.carried is None:
            return None, 0
        fresh = np.flatnonzero(step - 1 - self.carried.versions <= max_staleness)
        return (self.carried.select(fresh) if len(fresh) else None), len(self.carried) - len(fresh)


@dataclass(frozen=True)
class PromptSource:
    """Which row each prompt number has, and which numbers are left out."""

    row: Callable[[int], int]
    num_rows: int  # per epoch
    skips: Callable[[History, int, int], bool] | None = None  # (history, row, number) -> left out

    @classmethod
    def of(cls, order: PromptOrder, skip: SkipUniformConfig, *, seed: int) -> "PromptSource":
        """The prompts in `order`; with `skip`, without some whose past groups were uniform."""

        def skips(history: History, row: int, number: int) -> bool:
            return history.skips(row, number, seed=seed, floor=skip.floor, decay=skip.decay)

        return cls(order.row, order.num_rows, skips if skip.enable else None)

    def numbers(self, history: History, start: int, count: int, stop: float) -> tuple[list[int], int]:
        """The next `count` numbers below `stop` that are not left out, and the number after the last one examined."""
        numbers, number = [], start
        while len(numbers) < count and number < stop:
            if self.skips is None or not self.skips(history, self.row(number), number):
                numbers.append(number)
            number += 1
        return numbers, number
