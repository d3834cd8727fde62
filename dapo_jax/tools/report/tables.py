"""Host: the tables of the report: key numbers, the group filter, time by stage, efficiency; a column per run."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from dapo_jax.monitor.console import STAGES
from dapo_jax.monitor.statistics import HELD_OUT
from dapo_jax.tools.report.describe import held_out
from dapo_jax.tools.report.numbers import (
    OUTSIDE,
    alarm_steps,
    duration,
    groups,
    last,
    mean,
    number,
    percent,
    ratio,
    stage_seconds,
    total,
    values,
)
from dapo_jax.tools.report.read import RunFiles
from dapo_jax.tools.report.words import EFFICIENCY


class Line(NamedTuple):
    """A row of a table."""

    name: str
    note: str
    cells: list[str]


class Part(NamedTuple):
    """A part of a bar, with its share of the whole."""

    name: str
    style: str
    count: str
    share: float


class Stage(NamedTuple):
    name: str
    metric: str
    outside: bool  # outside timing_s/step
    cells: list[tuple[str, float]]  # seconds in words, share of the run's time


def key_numbers(runs: Sequence[RunFiles]) -> list[Line]:
    """The numbers by which runs are compared first."""
    lines = []
    for metric in dict.fromkeys(metric for run in runs for metric in held_out(run)):
        task = HELD_OUT.fullmatch(metric).group(1)  # pyright: ignore[reportOptionalMemberAccess]
        lines.append(_change(runs, metric, f"Held-out accuracy, {task}"))
    lines.append(_change(runs, "rollout/acc/mean", "Training accuracy"))
    lines.append(_line(runs, "Groups dropped", "", lambda run: percent(_dropped(run))))
    lines.append(_line(runs, "Steps", "", lambda run: number(len(run.steps))))
    lines.append(_line(runs, "Time", "", lambda run: duration(sum(stage_seconds(run.rows).values()))))
    share = "time in steps that count, of all since the first start"
    lines.append(_line(runs, "Goodput", share, lambda run: percent(last(run.steps, "perf/goodput"))))
    lines.append(_line(runs, "Lost to restarts", "from a checkpoint until the run continued", _lost))
    lines.append(_line(runs, "Alarms raised", "", lambda run: number(sum(map(bool, alarm_steps(run.rows).values())))))
    return [line for line in lines if any(cell != "-" for cell in line.cells)]


def filter_tables(runs: Sequence[RunFiles]) -> dict[str, list[Line]]:
    """What the group filter did over the whole run, by caption; {} if nothing was sampled."""
    if not any(total(run.steps, "dynamic_sampling/num_evaluated_prompts") for run in runs):
        return {}

    def summed(name: str) -> Callable[[RunFiles], str]:
        return lambda run: number(total(run.steps, f"dynamic_sampling/{name}"))

    def of_groups(name: str) -> Callable[[RunFiles], str]:
        def cell(run: RunFiles) -> str:
            found = groups(run.steps)
            return f"{number(found[name])} ({percent(ratio(found[name], found['sampled']))})"

        return cell

    of_all_steps = [
        _line(runs, "Sampled", "", lambda run: number(groups(run.steps)["sampled"])),
        _line(runs, "Kept", "responses differ", of_groups("kept")),
        _line(runs, "Dropped, all right", "too easy now", of_groups("all_correct")),
        _line(runs, "Dropped, all wrong", "too hard now", of_groups("all_wrong")),
        _line(runs, "Dropped, other", "neither, or without acc", of_groups("other")),
        _line(runs, "Requeued", "groups sampled again later", summed("num_requeued")),
        _line(runs, "Carried", "kept groups left to the next step", summed("num_carried_out")),
        _line(runs, "Discarded", "kept groups thrown away", summed("num_discarded_valid")),
    ]
    price = [
        _line(runs, "Filter", "metric, rule, leftover groups, schedule", _rule),
        _line(runs, "Rounds", "per step", lambda run: number(mean(run.steps, "dynamic_sampling/num_gen_batches"))),
        _line(runs, "Partial steps", "incomplete or unfiltered batches", summed("partial_step")),
        _line(runs, "Generated tokens", "", summed("generated_tokens")),
        _line(runs, "Trained tokens", "", summed("trained_tokens")),
        _line(runs, "Generated per trained token", "1 would waste nothing", _overgeneration),
    ]
    return {"Groups, sums over all steps": of_all_steps, "Rounds and tokens": price}


def filter_bar(run: RunFiles) -> list[Part]:
    """The sampled groups of a run as parts of a bar."""
    found = groups(run.steps)
    parts = {"kept": "kept", "all right": "all_correct", "all wrong": "all_wrong", "other": "other"}
    return [
        Part(name, key, number(found[key]), found[key] / found["sampled"])
        for name, key in parts.items()
        if found["sampled"] and found[key]
    ]


def stage_table(runs: Sequence[RunFiles]) -> list[Stage]:
    """Each stage's seconds and share, by the longest of the first run."""
    seconds = [stage_seconds(run.rows) for run in runs]
    return [
        Stage(
            STAGES.get(stage, stage),
            f"timing_s/{stage}" if stage != "other" else "",
            stage in OUTSIDE,
            [
                (duration(found[stage]), found[stage] / sum(found.values())) if stage in found else ("-", 0.0)
                for found in seconds
            ],
        )
        for stage in dict.fromkeys(stage for found in seconds for stage in found)
    ]


def efficiency(runs: Sequence[RunFiles]) -> list[Line]:
    """Needed over computed work of each part, the mean over steps."""
    return [
        _line(runs, name, f"the rest is {waste}", lambda run, metric=metric: percent(mean(run.steps, metric)))
        for metric, (name, waste) in EFFICIENCY.items()
        if any(values(run.steps, metric) for run in runs)
    ]


def _line(runs: Sequence[RunFiles], name: str, note: str, cell: Callable[[RunFiles], str]) -> Line:
    return Line(name, note, [cell(run) for run in runs])


def _change(runs: Sequence[RunFiles], metric: str, name: str) -> Line:
    """First and last value of a metric."""

    def cell(run: RunFiles) -> str:
        found = values(run.rows, metric)
        if len(found) < 2:
            return number(found[0][1]) if found else "-"
        return f"{number(found[0][1])} → {number(found[-1][1])}"

    return _line(runs, name, "first → last", cell)


def _dropped(run: RunFiles) -> float | None:
    found = groups(run.steps)
    return ratio(found["sampled"] - found["kept"], found["sampled"])


def _lost(run: RunFiles) -> str:
    seconds = last(run.steps, "time/lost")
    return "-" if seconds is None else duration(seconds)


def _overgeneration(run: RunFiles) -> str:
    generated, trained = (total(run.steps, f"dynamic_sampling/{name}_tokens") for name in ("generated", "trained"))
    return number(ratio(generated, trained))


def _rule(run: RunFiles) -> str:
    if not run.config:
        return "-"
    groups_of = "algorithm.filter_groups"
    if not run.option(f"{groups_of}.enable"):
        return "off"
    return ", ".join(str(run.option(f"{groups_of}.{key}")) for key in ("metric", "rule", "leftover", "backfill"))
