"""Host: finished training runs, found in folders and in earlier reports.

A run is identified by its config (the name of its folder, the same for equal configs) and its seed, whichever arm of
whichever comparison it was made for. So runs of another day or machine count as long as their report is available. Each
report states machine, versions and commit, and no run of a report is dropped silently. A change of the code or of a
default does not invalidate a run: choose another folder for runs and reports after a change that matters.
"""

import itertools
import json
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from dapo_jax.monitor.environment import recorded_environment
from dapo_jax.monitor.records import read_metrics
from dapo_jax.tools.sweep import FINISHED

KEPT = (  # of metrics.jsonl, for tables and pictures; with the accuracies and lengths on task sets
    "step",
    "dynamic_sampling/generated_tokens",
    "timing_s/step",
    "rollout/acc/mean",
    "response_length/mean",
    "response_length/clip_ratio",
    "actor/entropy",
    "dynamic_sampling/uniform_share",
    "train/filter_rate",
)
MEANS = "actor/pg_clipfrac", "rollout_corr/logprob_abs_diff"  # of which a table needs the mean over the steps alone
KEPT_OF_EVALUATION = "/acc/mean@", "/response_length/mean", "/response_length/clip_ratio"
VERSIONS = "python", "jax", "torch", "transformers", "trl"  # that are reported
Row = dict[str, float]


@dataclass(frozen=True)
class Run:
    """One training run of an arm. Reports keep its rows as columns."""

    arm: str
    config: str  # equal for equal configs, but for seed and workdir
    seed: int
    machine: str
    versions: Mapping[str, str]  # library -> version
    rows: list[Row]  # of metrics.jsonl, step by step, with the metrics that are KEPT
    means: Mapping[str, float]  # the MEANS of them
    commit: str = ""  # of the code that ended it, with "+" if files were changed; "" = not known
    exit_code: int = 0  # 1: it failed; its steps up to then count


def mark_finished(workdir: Path, exit_code: int = 0) -> None:
    """Records that a run has ended, how, and with which code."""
    described = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=12", "--dirty=+"]
    commit = subprocess.run(described, capture_output=True, text=True).stdout.strip()
    (workdir / FINISHED).write_text(json.dumps({"commit": commit, "exit_code": exit_code}))


def is_finished(workdir: Path) -> bool:
    """Whether the run of this workdir has ended."""
    return (workdir / FINISHED).exists()


def finished_runs(
    arms: Mapping[str, Path], seeds: Collection[int], reported: Mapping[tuple[str, int], Run] = MappingProxyType({})
) -> list[Run]:
    """The finished runs of some configs and seeds, arm by arm, by seed.

    Args:
        arms: name -> folder of the runs of its config, `seed0` and so on.
        reported: `reported_runs`, which count where the folders do not have them.
    """
    found = []
    for arm, folder in arms.items():
        of_arm = {seed: run for (config, seed), run in reported.items() if config == folder.name}
        of_arm |= {run.seed: run for run in runs_of_folder(arm, folder)}
        found += [replace(of_arm[seed], arm=arm) for seed in sorted(of_arm.keys() & set(seeds))]
    return found


def reported_runs(reports: Iterable[Path]) -> dict[tuple[str, int], Run]:
    """Config and seed -> run, of all reports among some files; the last report counts if several have it."""
    runs = [run for path in reports if path.exists() for run in json.loads(path.read_text()).get("runs", ())]
    return {(run["config"], run["seed"]): Run(**{**run, "rows": as_rows(run["rows"])}) for run in runs}


def as_columns(rows: Sequence[Row]) -> dict[str, Any]:
    """The rows by metric: its values, None where a row has none, or {number of the row: value} if most have none."""
    columns: dict[str, Any] = {}
    for name in dict.fromkeys(itertools.chain(*rows)):
        found = {number: _plain(row[name]) for number, row in enumerate(rows) if name in row}
        columns[name] = found if 2 * len(found) < len(rows) else [found.get(number) for number in range(len(rows))]
    return columns


def as_rows(columns: Mapping[str, Any]) -> list[Row]:
    """The rows of `as_columns`; each has a step."""
    rows: list[Row] = [{} for _ in columns["step"]]
    for name, found in columns.items():
        for number, value in found.items() if isinstance(found, dict) else enumerate(found):
            if value is not None:
                rows[int(number)][name] = value
    return rows


def _plain(value: float) -> float:
    """Whole numbers without their decimal point, which a file has no use for."""
    return int(value) if float(value).is_integer() else value


def _rounded(value: float) -> float:
    """Counts as they are, other numbers with four digits."""
    return value if float(value).is_integer() else float(f"{value:.4g}")


def means_of(rows: Sequence[Mapping[str, float | None]]) -> dict[str, float]:
    """The MEANS, each over the rows that have it; without those that no row has."""
    values = {name: [value for row in rows if (value := row.get(name)) is not None] for name in MEANS}
    return {name: float(np.mean(found)) for name, found in values.items() if found}


def runs_of_folder(arm: str, folder: Path) -> Iterator[Run]:
    """The finished runs of a config."""
    for workdir in folder.glob("seed*"):
        if is_finished(workdir):
            where = recorded_environment(workdir)
            measured = read_metrics(workdir)
            rows = [{key: _rounded(value) for key, value in row.items() if is_kept(key, value)} for row in measured]
            yield Run(
                arm=arm,
                config=folder.name,
                seed=int(workdir.name.removeprefix("seed")),
                machine=f"{where['devices']} on {where['host']}",
                versions={name: where["versions"][name] for name in VERSIONS if name in where["versions"]},
                rows=rows,
                means=means_of(measured),
                **json.loads((workdir / FINISHED).read_text() or "{}"),
            )


def check_nothing_is_lost(report: Path, arms: Mapping[str, Path], seeds: Collection[int]) -> None:
    """Ends the script if a report is about to be overwritten without some of its runs."""
    kept = {(folder.name, seed) for folder in arms.values() for seed in seeds}
    if lost := reported_runs([report]).keys() - kept:
        runs = ", ".join(f"config {config} with seed {seed}" for config, seed in sorted(lost))
        sys.exit(f"{report} has runs that would be lost: {runs}; name their seeds too, or choose another --output")


def is_kept(metric: str, value: float | None) -> bool:
    """Whether a value of metrics.jsonl is part of the report."""
    if value is None:
        return False
    return metric in KEPT or (metric.startswith("eval/") and any(part in metric for part in KEPT_OF_EVALUATION))
