"""Trains the arms of a comparison with several seeds each, and writes table, pictures and figures.

    python scripts/comparisons/run_ablation.py [dapo] [--seeds 0 1 2] [--output docs/results] [--config.key=value ...]

ablations.py lists the comparisons; `dapo` is the paper's table, from naive GRPO to all parts. Equal configs are run
once, whichever arm they belong to. Finished runs are not repeated, including those in a report in the output folder.
Interrupted runs resume from their last checkpoint. So you can add seeds later. To repeat runs of docs/results, choose
another output. Checkpoints of finished runs are deleted. comparison_report.py writes the reports, and its docstring
explains the table; pictures need pip install -e '.[plots]'.
"""

if __name__ == "__main__":  # the imports below take seconds
    from dapo_jax.command.interrupts import end_at_once

    end_at_once("run_ablation")

import argparse
import dataclasses
import hashlib
import json
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ablations import COMPARISONS, Comparison
from comparison_report import report
from finished_runs import check_nothing_is_lost, finished_runs, is_finished, mark_finished, reported_runs

from dapo_jax.command.command_line import read_config, refusals
from dapo_jax.config.values import default_config, flatten, freeze
from dapo_jax.monitor.records import read_metrics
from dapo_jax.tools.plot import empty_figure, points
from dapo_jax.tools.sweep import run_training

ROOT = Path(__file__).resolve().parents[2]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", choices=COMPARISONS, default="dapo")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "ablation", help="folder of the workdirs")
    parser.add_argument(
        "--accept-failures",
        action="store_true",
        help="a failed run (exit code 1) counts as far as it came; otherwise it ends the script",
    )
    parser.add_argument("--output", type=Path, help="folder of table and figures; none are written unless given")
    given, options = parser.parse_known_args(arguments)
    if given.output:
        empty_figure()  # fails now, not after hours, if it is missing
    comparison = COMPARISONS[given.name]
    configured = {arm: command_options(comparison, arm, options) for arm in comparison.arms}
    folders = {arm: folder_of(given.runs, configured[arm]) for arm in comparison.arms}
    failures = ["--accept-failures"] if given.accept_failures else []
    reports = []
    if given.output:
        own = given.output / f"{given.name}.json"
        check_nothing_is_lost(own, folders, given.seeds)
        reports = [*sorted(set(given.output.glob("*.json")) - {own}), own]
    reported = reported_runs(reports)
    for seed in given.seeds:
        for arm, folder in folders.items():
            if (folder.name, seed) not in reported:
                train(arm, configured[arm], folder, seed, accept_failure=given.accept_failures)
    about = {
        "command": command_of("run_ablation.py", given.name, seeds=given.seeds, options=failures + options),
        "config": comparison.config,
        "shared": dict(comparison.shared),
        "arms": {arm: dict(changed) for arm, changed in comparison.arms.items()},
    }
    report(given.name, finished_runs(folders, given.seeds, reported), given.output, about)


def command_of(script: str, *arguments: str, seeds: Sequence[int], options: Sequence[str]) -> str:
    """The command that makes a report from scratch."""
    chosen = ["--seeds", *map(str, seeds), "--output", "docs/results", *options]
    return shlex.join(["python", f"scripts/comparisons/{script}", *arguments, *chosen])


def command_options(comparison: Comparison, arm: str, options: Sequence[str] = ()) -> list[str]:
    """The options of the training command, except seed and workdir; those of the arm override `options`."""
    changed = {**comparison.shared, **comparison.arms[arm]}
    return [
        f"--config={ROOT / comparison.config}",
        *options,
        *(f"--config.{key}={value}" for key, value in changed.items()),
    ]


def folder_of(runs: Path, options: Sequence[str]) -> Path:
    """Where the runs of a config are kept, one folder per seed: the same for equal configs, however they are written.

    What has its default does not count, so that a key that is new leaves old runs what they are; nor does the folder
    that the model's file or the environment's lies in.
    """
    config = dataclasses.replace(read_config(["run_ablation", *options]), seed=0, workdir="")
    for section in ("model", "environment"):
        found = getattr(config, section)
        config = dataclasses.replace(config, **{section: dataclasses.replace(found, path=Path(found.path).name)})
    given = flatten(dataclasses.asdict(config))
    default = flatten(dataclasses.asdict(freeze(default_config())))
    changed = {key: value for key, value in given.items() if value != default[key]}
    digest = hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()
    return runs / digest[:12]


def train(arm: str, options: Sequence[str], folder: Path, seed: int, *, accept_failure: bool = False) -> None:
    """Runs one config with one seed to the end, unless it has finished.

    Args:
        accept_failure: a failed run counts as far as it came; otherwise it ends the script.
    """
    workdir = folder / f"seed{seed}"
    if is_finished(workdir):
        return
    print(f"{arm}, seed {seed}: ", end="", flush=True)
    start = time.monotonic()
    workdir.mkdir(parents=True, exist_ok=True)
    with open(workdir / "output.txt", "a") as output:
        code = run_training(options, workdir, seed, output=output, cwd=ROOT)
    if code and not (accept_failure and code == 1):
        sys.exit(f"failed with exit code {code}, see {workdir / 'output.txt'}")
    mark_finished(workdir, code)
    shutil.rmtree(workdir / "checkpoints", ignore_errors=True)  # gigabytes, and what is measured is in metrics.jsonl
    rows = read_metrics(workdir)
    accuracy = next(reversed(points(rows, None, "steps")[1]), None)
    ended = f", ended with an error after step {rows[-1]['step']}" if code else ""
    print(f"{accuracy} held out after {time.monotonic() - start:.0f} s{ended}", flush=True)


if __name__ == "__main__":
    with refusals(sys.argv):
        main()
