"""Host: what becomes of finished runs: curves from their metrics.jsonl, a table and a picture of several arms.

Columns of the table, each a mean over the seeds, and "-" where nothing was measured:

    before, after    accuracy on held-out problems before the first and after the last step, (least to most)
    equal tokens     the same after as many sampled tokens as the thriftiest of all runs took in the end, interpolated
    tokens, seconds  sampled, and taken by training steps (evaluation is not in them)
    length, cut off  of the answers to held-out problems after the last step: tokens, and share that ran into the limit
    entropy, uniform    of the last quarter of the steps: nats per token, share of sampled groups that are all right or
                     all wrong
    mismatch         mean over tokens of |log-probability of the training pass - sampler's|, nats, over all steps
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from finished_runs import Row, Run
from markdown_table import markdown_table
from plot_run import AXES, points, pyplot

COLUMNS = 3  # of the picture
PANELS = (  # title, metric (None: held-out accuracy), axis
    ("held-out accuracy", None, "steps"),
    ("held-out accuracy", None, "tokens"),
    ("held-out accuracy", None, "seconds"),
    ("training accuracy", "rollout/acc/mean", "steps"),
    ("entropy, nats per token", "actor/entropy", "steps"),
    ("length of trained responses, tokens", "response_length/mean", "steps"),
    ("share of trained responses cut off", "response_length/clip_ratio", "steps"),
    ("share of sampled groups that are uniform", "dynamic_sampling/uniform_share", "steps"),
    ("filter rate: share of sampled groups dropped", "train/filter_rate", "steps"),
)


def report(name: str, runs: Sequence[Run], output: Path | None, about: Mapping[str, Any]) -> None:
    """Prints the table of finished runs; if there is an output, writes OUTPUT/NAME.json and the curves, NAME.png.

    NAME_accuracy.png has the first row of the curves: held-out accuracy.

    Args:
        about: further entries of the JSON object, such as the command.
    """
    lines = table(runs)
    print(markdown_table(lines))
    if output is None:
        return
    output.mkdir(parents=True, exist_ok=True)
    path = output / f"{name}.json"
    found = {**about, "table": lines, "runs": [asdict(run) for run in runs]}
    path.write_text(json.dumps(found) + "\n", encoding="utf-8")
    draw(runs, PANELS, output / f"{name}.png")
    draw(runs, PANELS[:COLUMNS], output / f"{name}_accuracy.png")


def table(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One row an arm; the docstring of this file explains the columns."""
    budget = min(points(run.rows, None, "tokens")[0][-1] for run in runs)
    lines = []
    for arm in dict.fromkeys(run.arm for run in runs):
        of_arm = [run.rows for run in runs if run.arm == arm]
        curves = [points(rows, None, "tokens") for rows in of_arm]
        ends = [rows[-max(len(rows) // 4, 1) :] for rows in of_arm]
        answers = [[last_answers(rows)] for rows in of_arm]
        lines.append(
            {
                "arm": arm,
                "seeds": len(of_arm),
                "before": spread([values[0] for _, values in curves]),
                "after": spread([values[-1] for _, values in curves]),
                "equal tokens": spread([float(np.interp(budget, *curve)) for curve in curves]),
                "tokens": f"{np.mean([total(rows, 'dynamic_sampling/generated_tokens') for rows in of_arm]):.0f}",
                "seconds": f"{np.mean([total(rows, 'timing_s/step') for rows in of_arm]):.0f}",
                "length": measured(answers, "response_length/mean", ".1f"),
                "cut off": measured(answers, "response_length/clip_ratio", ".3f"),
                "entropy": measured(ends, "actor/entropy", ".3f"),
                "uniform": measured(ends, "dynamic_sampling/uniform_share", ".3f"),
                "mismatch": measured(of_arm, "rollout_corr/logprob_abs_diff", ".1e"),
            }
        )
    return lines


def spread(values: Sequence[float]) -> str:
    """The mean, and of several values the least and the most."""
    mean = f"{np.mean(values):.3f}"
    return f"{mean} ({min(values):.3f} to {max(values):.3f})" if len(values) > 1 else mean


def total(rows: Sequence[Row], metric: str) -> float:
    """Sum over the steps."""
    return sum(row.get(metric, 0.0) for row in rows)


def last_answers(rows: Sequence[Row]) -> Row:
    """Length and cut-off share of the last evaluation that measured them, means over the task sets; or nothing."""
    answers = ({name: value for name, value in row.items() if "/response_length/" in name} for row in reversed(rows))
    last = next(filter(None, answers), {})
    metrics = {"response_length/" + name.rpartition("/")[2] for name in last}
    return {
        metric: float(np.mean([value for name, value in last.items() if name.endswith(metric)])) for metric in metrics
    }


def measured(runs: Sequence[Sequence[Row]], metric: str, form: str) -> str:
    """Mean over all steps of all runs that have the metric; "-" without any."""
    found = [row[metric] for rows in runs for row in rows if metric in row]
    return format(float(np.mean(found)), form) if found else "-"


def draw(runs: Sequence[Run], panels: Sequence[tuple[str, str | None, str]], path: Path) -> None:
    """The curves of all arms: means over seeds, with bands from the least to the most."""
    rows = len(panels) // COLUMNS
    figure, grid = pyplot().subplots(rows, COLUMNS, figsize=(15, 3.7 * rows), layout="constrained")
    for (title, metric, axis), axes in zip(panels, grid.flat, strict=True):
        for arm in dict.fromkeys(run.arm for run in runs):
            places, values = mean_curve([run.rows for run in runs if run.arm == arm], metric, axis)
            if values.size:
                [line] = axes.plot(places, values.mean(0), marker="." if metric is None else None, label=arm)
                axes.fill_between(places, values.min(0), values.max(0), alpha=0.12, color=line.get_color())
        axes.set(title=title, xlabel=AXES[axis][0])
        axes.grid(alpha=0.3)
    grid.flat[0].legend(fontsize=8)
    figure.savefig(path, dpi=90)


def mean_curve(runs: Sequence[Sequence[Mapping[str, float]]], metric: str | None, axis: str) -> tuple[Any, Any]:
    """Places [N], means over the runs, and values [runs, N] of the steps that all runs have."""
    curves = [points(rows, metric, axis) for rows in runs]
    length = min(len(values) for _, values in curves)
    places = np.mean([places[:length] for places, _ in curves], 0)
    return places, np.array([values[:length] for _, values in curves])
