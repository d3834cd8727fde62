"""Host: sums and means over the steps of a run, and numbers as text."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
OUTSIDE = ("testing", "save_checkpoint", "write")  # stages outside timing_s/step
_STAGE = "timing_s/"


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def values(rows: Sequence[Row], metric: str) -> list[tuple[int, float]]:
    """Step and value of a metric, where it is a finite number."""
    return [(row["step"], row[metric]) for row in rows if is_number(row.get(metric))]


def total(rows: Sequence[Row], metric: str) -> float:
    return math.fsum(value for _, value in values(rows, metric))


def mean(rows: Sequence[Row], metric: str) -> float | None:
    found = values(rows, metric)
    return math.fsum(value for _, value in found) / len(found) if found else None


def last(rows: Sequence[Row], metric: str) -> float | None:
    found = values(rows, metric)
    return found[-1][1] if found else None


def names(rows: Sequence[Row]) -> list[str]:
    """Every metric of the rows, in the order of their first appearance."""
    return list(dict.fromkeys(name for row in rows for name in row))


def ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def stage_seconds(rows: Sequence[Row]) -> dict[str, float]:
    """Seconds of each stage over all rows, the longest first; "other" is what a step spends outside its stages."""
    found = {
        name.removeprefix(_STAGE): total(rows, name)
        for name in names(rows)
        if name.startswith(_STAGE) and name != "timing_s/step"
    }
    other = total(rows, "timing_s/step") - sum(found[stage] for stage in found if stage not in OUTSIDE)
    if other > 0:
        found["other"] = other
    return dict(sorted(found.items(), key=lambda stage: -stage[1]))


def groups(steps: Sequence[Row]) -> dict[str, float]:
    """What became of the sampled groups: kept, all_correct, all_wrong, other; their sum is `sampled`."""
    sampled = total(steps, "dynamic_sampling/num_evaluated_prompts")
    reasons = ("all_correct", "all_wrong", "other")
    dropped = {reason: total(steps, f"dynamic_sampling/filtered_{reason}") for reason in reasons}
    return {"sampled": sampled, "kept": sampled - sum(dropped.values()), **dropped}


def alarm_steps(rows: Sequence[Row]) -> dict[str, list[tuple[int, int]]]:
    """For each alarm, the ranges of steps with it: from the first to the last of rows that have it on."""
    found: dict[str, list[tuple[int, int]]] = {}
    for name in (name for name in names(rows) if name.startswith("alarm/")):
        ranges: list[tuple[int, int]] = []
        was_on = False
        for step, value in values(rows, name):
            if value > 0:
                ranges = [*ranges[:-1], (ranges[-1][0], step)] if was_on else [*ranges, (step, step)]
            was_on = value > 0
        found[name.removeprefix("alarm/")] = ranges
    return found


def is_on(rows: Sequence[Row], alarm: str) -> int:
    """The number of rows with the alarm on."""
    return sum(value > 0 for _, value in values(rows, f"alarm/{alarm}"))


def number(value: Any, digits: int = 3) -> str:
    """A number for reading: 0.0312, 12.5, 1,936, 3e-07; "-" for none."""
    if not is_number(value):
        return "-"
    size = abs(float(f"{value:.{digits - 1}e}"))
    if size and (size < 1e-4 or size >= 1e9):
        return short_power(f"{value:.{digits - 1}e}")
    if size >= 100 or value == int(value):
        return f"{value:,.0f}"
    decimals = digits - 1 - math.floor(math.log10(size))
    return f"{value:.{max(decimals, 0)}f}"


def short_power(text: str) -> str:
    """2e-7 for 2e-07, 3e9 for 3e+09."""
    return text.replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")


def percent(share: float | None) -> str:
    if share is None:
        return "-"
    if 0 < share < 0.001:
        return "<0.1%"
    return f"{share:.1%}" if 0 < share < 0.1 else f"{share:.0%}"


def duration(seconds: float) -> str:
    """12.5 s, 3 min 20 s, 5 h 12 min."""
    if seconds < 60:
        return f"{number(seconds, 2)} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60} min"


def step_ranges(ranges: Sequence[tuple[int, int]], most: int = 6) -> str:
    """1–40, 52, 60–61; after `most` ranges, how many more there are."""
    shown = ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in ranges[:most])
    return shown + (f" and {len(ranges) - most} more" if len(ranges) > most else "")


def letter(run: int) -> str:
    """A for run 0, then B, ..., Z, AA, ..."""
    return chr(ord("A") + run) if run < 26 else letter(run // 26 - 1) + letter(run % 26)
