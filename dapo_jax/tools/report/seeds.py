"""Host: runs that differ in their seed alone: as one run, their mean; 95 % intervals, and differences of pairs."""

import dataclasses
import json
import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import scipy.special

from dapo_jax.tools.plot import points
from dapo_jax.tools.report.describe import steps, steps_left
from dapo_jax.tools.report.numbers import Row, is_number, total, values
from dapo_jax.tools.report.read import RunFiles

INTERVAL_SEEDS = 3  # with fewer, an interval says nothing
_OWN = ("seed", "workdir", "trainer.checkpoint_dir", "trainer.experiment_name", "trainer.project_name")  # of each run

Measures = Mapping[int, Mapping[str, float]]  # seed -> name -> value of the run; nan: not measured


def half_interval(values: Sequence[float]) -> float:
    """Half the width of the 95 % interval of the mean, for values that are normally distributed (Student, 1908)."""
    quantile = scipy.special.stdtrit(len(values) - 1, 0.975)
    return float(quantile * np.std(values, ddof=1) / len(values) ** 0.5)


def with_interval(values: Sequence[float], form: str, least: int = INTERVAL_SEEDS) -> str:
    """The mean of what was measured, of `least` values or more with half its interval; "-" for none."""
    found = [value for value in values if not np.isnan(value)]
    if not found:
        return "-"
    text = format(float(np.mean(found)), form)
    return f"{text} ± {format(half_interval(found), form.removeprefix('+'))}" if len(found) >= least else text


def spread(values: Sequence[float], least: int = INTERVAL_SEEDS) -> str:
    """The mean `with_interval`; with several values also the minimum and the maximum."""
    found, text = [value for value in values if not np.isnan(value)], with_interval(values, ".3f", least)
    return f"{text} ({min(found):.3f} to {max(found):.3f})" if len(found) > 1 else text


def paired(first: Measures, other: Measures, name: str, form: str, least: int = INTERVAL_SEEDS) -> str:
    """What `other` has more than `first`: the mean over pairs of runs with the same seed, with its interval."""
    seeds = sorted(first.keys() & other.keys())
    return with_interval([other[seed][name] - first[seed][name] for seed in seeds], f"+{form}", least)


def grouped(runs: Sequence[RunFiles]) -> list[RunFiles]:
    """The runs in their order, where several that differ in the seed alone are one."""
    found: dict[tuple[str, int], list[RunFiles]] = {}
    earlier: Counter[tuple[str, str]] = Counter()  # runs with the same options and seed: they are apart
    for number, run in enumerate(runs):
        options = {key: value for key, value in run.config.items() if key not in _OWN}
        key = json.dumps(options, sort_keys=True) if run.config else str(number)
        found.setdefault((key, earlier[key, str(run.option("seed"))]), []).append(run)
        earlier[key, str(run.option("seed"))] += 1
    return [_mean(group) if len(group) > 1 else group[0] for group in found.values()]


def _mean(runs: Sequence[RunFiles]) -> RunFiles:
    """The mean of runs: of those that have ended, if any has."""
    ended = [run for run in runs if not steps_left(run)] or runs
    seeds = ", ".join(str(run.option("seed")) for run in ended)
    note = f"Means over the seeds {seeds}, of the steps that all have; shaded: minimum to maximum. "
    note += "Alarms are those of any seed, samples those of the first."
    if rest := [f"{run.name} ({steps(run)} steps)" for run in runs if run not in ended]:
        note += f" Left out, as unfinished: {', '.join(rest)}."
    stems = {re.sub(r"/?seed_\d+$", "", run.name) for run in runs}
    return dataclasses.replace(
        ended[0],
        name=stems.pop() if len(stems) == 1 else " & ".join(run.name for run in runs),
        folder=Path(os.path.commonpath([run.folder.absolute() for run in runs])),
        config=ended[0].config | {"seed": seeds},
        rows=_mean_rows([run.rows for run in ended]),
        error=next(filter(None, (run.error for run in ended)), ""),
        warnings=[warning for run in runs for warning in run.warnings],
        seeds=tuple(ended),
        note=note,
    )


def _mean_rows(runs: Sequence[Sequence[Row]]) -> list[dict]:
    """The means over the runs, of the steps and metrics that all of them have."""
    by_step = [{row["step"]: row for row in rows} for rows in runs]
    means = []
    for step in sorted(set.intersection(*map(set, by_step))):
        here, row = [rows[step] for rows in by_step], {"step": step}
        for name in here[0]:
            if name != "step" and all(name in one for one in here):
                found = [one[name] for one in here if is_number(one[name])]
                row[name] = math.fsum(found) / len(found) if found else None
        means.append(row)
    return means


def bands_of(run: RunFiles, metric: str) -> dict[int, tuple[float, float]]:
    """Step -> the least and the greatest value of the seeds of a mean; {} for a single run."""
    found: dict[int, list[float]] = {}
    for step, value in (point for seed in run.seeds for point in values(seed.rows, metric)):
        found.setdefault(step, []).append(value)
    return {step: (min(several), max(several)) for step, several in found.items()}


def compared(columns: Sequence[RunFiles]) -> list[dict[str, str]]:
    """A row for each setting: held-out accuracy, its difference from the first over pairs with the same seed, cost."""
    measured = [{run.option("seed"): _measures(run) for run in column.seeds or (column,)} for column in columns]
    lines = []
    for found in measured:
        of = {name: [run[name] for run in found.values()] for name in ("before", "after", "tokens", "seconds")}
        lines.append(
            {"seeds": str(len(found))}
            | {name: spread(of[name]) for name in ("before", "after")}
            | {"difference": "-" if found is measured[0] else paired(measured[0], found, "after", ".3f")}
            | {name: with_interval(of[name], ".0f") for name in ("tokens", "seconds")}
        )
    return lines


def _measures(run: RunFiles) -> dict[str, float]:
    held_out = points(run.rows, None, "steps")[1] or [math.nan]
    tokens, seconds = (total(run.rows, metric) for metric in ("dynamic_sampling/generated_tokens", "timing_s/step"))
    return {"before": held_out[0], "after": held_out[-1], "tokens": tokens, "seconds": seconds}
