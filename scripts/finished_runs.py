"""Host: training runs that have come to their end: in folders, and in the reports that were written of them before.

A run is known by its config (the name of its folder, the same for equal configs) and its seed, whatever arm of whatever
comparison it was made for. So runs of another day or machine count wherever their report is at hand; machine and
versions are written down with each.
"""

import json
import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import jax

from dapo_jax.monitor.records import read_metrics

KEPT = (  # of metrics.jsonl; with the accuracies on task sets
    "step", "dynamic_sampling/generated_tokens", "timing_s/step", "rollout/acc/mean", "response_length/mean",
    "response_length/clip_ratio", "actor/entropy", "dynamic_sampling/uniform_share", "train/filter_rate",
    "actor/pg_clipfrac", "actor/grad_norm", "rollout_corr/logprob_abs_diff", "rollout_corr/k3_kl",
    "critic/score/mean", "perf/cpu_memory_used_gb",
)  # fmt: skip
KEPT_OF_EVALUATION = "/acc/mean@", "/response_length/mean", "/response_length/clip_ratio"
FINISHED = "finished"  # file in the workdir of a run that has come to its end: machine and versions
Row = dict[str, float]


@dataclass(frozen=True)
class Run:
    """One training run of an arm, as reports keep it."""

    arm: str
    config: str  # equal for equal configs, but for seed and workdir
    seed: int
    machine: str
    versions: Mapping[str, str]  # library -> version
    rows: list[Row]  # of metrics.jsonl, step by step, with the metrics that are KEPT


def mark_finished(workdir: Path, versions: Mapping[str, str] | None = None) -> None:
    """Writes down that a run has come to its end on this machine; `versions` instead of those of our libraries."""
    ours = {"python": platform.python_version(), "jax": jax.__version__}
    (workdir / FINISHED).write_text(json.dumps({"machine": machine(), "versions": versions or ours}))


def is_finished(workdir: Path) -> bool:
    """Whether the run of this workdir has come to its end."""
    return (workdir / FINISHED).exists()


def finished_runs(arms: Mapping[str, Path], reports: Iterable[Path] = ()) -> list[Run]:
    """Every run of some configs that has come to its end, arm by arm, by seed.

    Args:
        arms: name -> folder of the runs of its config, `seed0` and so on.
        reports: files of earlier reports, whose runs count where the folders do not have them.
    """
    reported = reported_runs(reports)
    found = []
    for arm, folder in arms.items():
        of_arm = {seed: replace(run, arm=arm) for (config, seed), run in reported.items() if config == folder.name}
        of_arm |= {run.seed: run for run in runs_of_folder(arm, folder)}
        found += [of_arm[seed] for seed in sorted(of_arm)]
    return found


def reported_runs(reports: Iterable[Path]) -> dict[tuple[str, int], Run]:
    """Config and seed -> run, of all reports of runs among some files."""
    runs = [run for path in reports if path.exists() for run in json.loads(path.read_text()).get("runs", ())]
    return {(run["config"], run["seed"]): Run(**run) for run in runs}


def runs_of_folder(arm: str, folder: Path) -> Iterator[Run]:
    """The finished runs of a config."""
    for workdir in folder.glob("seed*"):
        if is_finished(workdir):
            seed = int(workdir.name.removeprefix("seed"))
            where = json.loads((workdir / FINISHED).read_text())
            rows = [
                {key: float(f"{value:.6g}") for key, value in row.items() if value is not None and is_kept(key)}
                for row in read_metrics(workdir)
            ]
            yield Run(arm, folder.name, seed, where["machine"], where["versions"], rows)


def is_kept(metric: str) -> bool:
    """Whether a metric of metrics.jsonl is part of the report."""
    return metric in KEPT or (metric.startswith("eval/") and any(part in metric for part in KEPT_OF_EVALUATION))


def machine() -> str:
    """Devices and cores."""
    return f"{jax.device_count()} x {device_name()}, {os.cpu_count()} cores"


def device_name() -> str:
    """The kind of device; of a CPU, what Linux calls it."""
    kind = jax.devices()[0].device_kind
    described = Path("/proc/cpuinfo")
    if kind != "cpu" or not described.exists():
        return kind
    names = (line.partition(":")[2].strip() for line in described.read_text().splitlines() if "model name" in line)
    return next(names, kind)
