"""Host: how the group filter of a run is doing, from its log or its metrics.

    dapo-jax monitor runs/quickstart [--plot filter.png]
    dapo-jax monitor runs/quickstart/train.log

From a work directory it reads metrics.jsonl. The plot (matplotlib) shows the share of kept groups, the rounds and the
generated tokens per trained token of each training step; it needs metrics.jsonl.
"""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dapo_jax.command.command_line import refusals
from dapo_jax.command.help import command_parser
from dapo_jax.errors import InputError, say
from dapo_jax.monitor.log import LOG
from dapo_jax.monitor.records import METRICS
from dapo_jax.tools.plot import empty_figure, metrics_of, record_of


def read_log(path: Path) -> dict[str, list[float]]:
    """Each block's round, filter rate, kept prompts and step, from train.log. With segments a step has one block."""
    found: dict[str, list[float]] = {"batches": [], "filter_rates": [], "kept_prompts": [], "steps": []}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if match := re.search(r"Generated batch (\d+)", line):
            found["batches"].append(int(match[1]))
        elif match := re.search(r"Filtered \(.*\((\d+\.\d+)%\)", line):  # in brackets: the rule
            found["filter_rates"].append(float(match[1]) / 100)
        elif match := re.search(r"Kept \(.* (\d+) prompts", line):
            found["kept_prompts"].append(int(match[1]))
        elif match := re.search(r"Step (\d+), Gen batch", line):
            found["steps"].append(int(match[1]))
    return found


def read_steps(path: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl that belong to training steps with a filter."""
    return [row for row in metrics_of(path) if "dynamic_sampling/num_gen_batches" in row]


def log_summary(found: dict[str, list[float]]) -> list[str]:
    """Rounds, steps, mean filter rate, kept prompts per round."""
    if not found["batches"]:
        return ["no generation round in the log: is the filter on?"]
    last, kept = dict(zip(found["steps"], found["batches"], strict=False)), sum(found["kept_prompts"])  # it may be cut
    steps, rounds = len(last), sum(last.values())
    return [
        f"training steps                 {steps}",
        f"generation rounds              {rounds:.0f} ({rounds / max(steps, 1):.2f} per step)",
        f"mean filter rate               {sum(found['filter_rates']) / max(len(found['filter_rates']), 1):.1%}",
        f"kept prompts                   {kept:.0f} ({kept / max(rounds, 1):.1f} per round)",
    ]


def steps_summary(rows: list[dict[str, Any]]) -> list[str]:
    """The same from metrics.jsonl, with numbers that the log lacks."""
    if not rows:
        return ["no training step with a filter in the metrics"]

    def total(name: str) -> float:
        return sum(row.get(f"dynamic_sampling/{name}") or 0 for row in rows)

    evaluated, rounds = total("num_evaluated_prompts"), total("num_gen_batches")
    right, wrong = total("filtered_all_correct"), total("filtered_all_wrong")
    dropped = right + wrong + total("filtered_other")
    return [
        f"training steps                 {len(rows)}",
        f"generation rounds              {rounds:.0f} ({rounds / len(rows):.2f} per step)",
        f"mean filter rate               {dropped / max(evaluated, 1):.1%}",
        f"mean kept prompts per round    {(evaluated - dropped) / max(rounds, 1):.1f}",
        f"dropped: all right, all wrong  {right:.0f}, {wrong:.0f}",
        f"requeued, carried, discarded   {total('num_requeued'):.0f}, {total('num_carried_out'):.0f}, "
        f"{total('num_discarded_valid'):.0f}",
        f"partial steps                  {total('partial_step'):.0f}",
        f"generated per trained token    {total('generated_tokens') / max(total('trained_tokens'), 1):.2f}",
    ]


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Keep rate, rounds and generated tokens per trained token against training steps."""
    curves = {
        "kept groups / evaluated": [1 - row.get("train/filter_rate", math.nan) for row in rows],
        "rounds": [row["train/num_gen_batches"] for row in rows],
        "generated / trained tokens": [row["dynamic_sampling/overgen_ratio"] for row in rows],
    }
    figure = empty_figure(figsize=(7, 7), layout="tight")
    axes = figure.subplots(len(curves), sharex=True)
    for axis, (name, values) in zip(axes, curves.items(), strict=True):
        axis.plot([row["step"] for row in rows], values)
        axis.set_ylabel(name)
        axis.set_ylim(bottom=0)
    axes[-1].set_xlabel("training step")
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_parser("dapo-jax monitor", __doc__)
    parser.add_argument("run", help="work directory of a run, or its metrics.jsonl or train.log")
    parser.add_argument("--plot", type=Path, help="PNG to write; needs metrics.jsonl and matplotlib")
    given = parser.parse_args(arguments)
    with refusals(["monitor"]):
        path = record_of(given.run, METRICS, LOG)
        is_log = path.suffix == ".log"
        if given.plot and is_log:
            raise InputError(f"--plot needs {METRICS}, and {given.run} is the log: give the workdir")
        say("\n".join(log_summary(read_log(path)) if is_log else steps_summary(read_steps(path))))
        if given.plot:
            plot(read_steps(path), given.plot)
