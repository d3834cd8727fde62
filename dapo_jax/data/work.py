"""Host: how much of what the devices compute is needed."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """Floating-point operations, counted on the host from lengths and shapes alone: the same in every run.

    Padding, rows that have ended and keys that no token may see are computed and not needed.
    """

    computed: float = 0.0
    needed: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.computed + other.computed, self.needed + other.needed)

    @property
    def efficiency(self) -> float:
        """The needed share of what is computed."""
        return self.needed / self.computed


def total_work(parts: Iterable[Mapping[str, Work]]) -> dict[str, Work]:
    """The work of all parts by stage."""
    total: dict[str, Work] = {}
    for part in parts:
        for stage, work in part.items():
            total[stage] = total.get(stage, Work()) + work
    return total


def efficiencies(parts: Iterable[Mapping[str, Work]]) -> dict[str, float]:
    """`perf/{stage}_efficiency` of each stage that computed something, over all parts."""
    return {f"perf/{stage}_efficiency": work.efficiency for stage, work in total_work(parts).items() if work.computed}
