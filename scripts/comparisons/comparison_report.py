"""Host: reports on finished runs: curves from their metrics.jsonl, a table and pictures of several arms.

Columns of the table, each a mean over the seeds, from INTERVAL_SEEDS seeds on ± half its 95 % interval by Student's t,
and "-" if nothing was measured:

    before, after    accuracy on held-out problems before the first and after the last step (minimum to maximum)
    equal steps      the same after as many steps as the shortest of all runs has (`step_budget`), if others
                     have more
    equal tokens     the same after as many sampled tokens as the shortest of all runs has in total (`token_budget`),
                     interpolated
    tokens           sampled
    seconds          of training steps, without evaluation, on the kind of machine that has run all arms
    length, cut off  of the answers to held-out problems after the last step: tokens, and share that hit the limit
    trained ...      the same of trained answers, over all steps
    clipped          share of trained tokens whose loss is clipped, over all steps
    entropy, uniform    of the last quarter of the steps: nats per token, share of sampled groups that are all right or
                     all wrong
    mismatch         mean over tokens of |log-probability of the training pass - sampler's|, nats, over all steps
"""

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from finished_runs import Row, Run, as_columns

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/, for what its folders share

from markdown_table import markdown_table

from dapo_jax.tools.plot import AXES, empty_figure, points
from dapo_jax.tools.report.numbers import mean, total
from dapo_jax.tools.report.seeds import paired, spread, with_interval

INTERVAL_SEEDS = 5  # with fewer, the interval is wide and says little
FORMS = {  # columns that hold a measure of each run
    "before": ".3f",
    "after": ".3f",
    "equal steps": ".3f",
    "equal tokens": ".3f",
    "tokens": ".0f",
    "length": ".1f",
    "cut off": ".3f",
    "trained length": ".1f",
    "trained cut off": ".3f",
    "clipped": ".4f",
    "entropy": ".3f",
    "uniform": ".3f",
    "mismatch": ".1e",
}
ACCURACIES = "before", "after", "equal steps", "equal tokens"
DIFFERENCES = "after", "equal steps", "equal tokens", "trained length", "trained cut off", "clipped", "entropy"
COLUMNS = 3  # of the picture
ACCURACY_PANELS = 3  # the first ones
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

    NAME_accuracy.png has held-out accuracy alone.

    Args:
        about: further entries of the JSON object, such as the command.
    """
    lines = table(runs)
    print(markdown_table(lines))
    if output is None:
        return
    output.mkdir(parents=True, exist_ok=True)
    path = output / f"{name}.json"
    found = {
        **about,
        "table": lines,
        "differences": differences(runs),
        "step_budget": step_budget(runs),
        "token_budget": token_budget(runs),
        "deviation_between_seeds": deviation_between_seeds(runs),
        "runs": [asdict(run) | {"rows": as_columns(run.rows)} for run in runs],
    }
    path.write_text(json.dumps(found, separators=(",", ":")) + "\n", encoding="utf-8")
    draw(name, runs, PANELS, output / f"{name}.png")
    draw(name, runs, PANELS[:ACCURACY_PANELS], output / f"{name}_accuracy.png")


def timed(runs: Sequence[Run]) -> list[Run]:
    """The runs whose seconds can be compared: of the kind of machine that ran all arms and most runs; or none."""
    arms = {run.arm for run in runs}
    kinds = Counter(run.machine for run in runs)
    for kind, _ in kinds.most_common():
        found = [run for run in runs if run.machine == kind]
        if {run.arm for run in found} == arms:
            return found
    return []


def token_budget(runs: Sequence[Run]) -> float:
    """The fewest tokens that a run sampled until its last evaluation."""
    return min(points(run.rows, None, "tokens")[0][-1] for run in runs)


def step_budget(runs: Sequence[Run]) -> float:
    """The fewest steps after which a run was evaluated last."""
    return min(points(run.rows, None, "steps")[0][-1] for run in runs)


def deviation_between_seeds(runs: Sequence[Run]) -> float | None:
    """Standard deviation of the last held-out accuracy between the seeds of an arm, pooled over the arms.

    None without an arm of several seeds.
    """
    last: dict[str, list[float]] = {}
    for run in runs:
        last.setdefault(run.arm, []).append(points(run.rows, None, "steps")[1][-1])
    several = [values for values in last.values() if len(values) > 1]
    if not several:
        return None
    squares = sum(float(np.var(values)) * len(values) for values in several)
    return (squares / sum(len(values) - 1 for values in several)) ** 0.5


def table(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One row per arm; the docstring of this file explains the columns."""
    comparable = timed(runs)
    lines = []
    for arm, of_arm in measures(runs).items():
        columns = {name: [measured[name] for measured in of_arm.values()] for name in FORMS}
        seconds = [total(run.rows, "timing_s/step") for run in comparable if run.arm == arm]
        cells = {
            name: spread(values, INTERVAL_SEEDS)
            if name in ACCURACIES
            else with_interval(values, FORMS[name], INTERVAL_SEEDS)
            for name, values in columns.items()
        }
        lines.append(
            {"arm": arm, "seeds": len(of_arm)} | cells | {"seconds": f"{np.mean(seconds):.0f}" if seconds else "-"}
        )
    return lines if of_unequal_steps(runs) else [without_equal_steps(line) for line in lines]


def differences(runs: Sequence[Run]) -> list[dict[str, str]]:
    """One row per arm but the first: what it has more than the first, mean over pairs of runs with the same seed.

    Empty if an arm has fewer than INTERVAL_SEEDS pairs.
    """
    (_, first), *others = measures(runs).items()
    lines = []
    for arm, of_arm in others:
        if len(first.keys() & of_arm.keys()) < INTERVAL_SEEDS:
            return []
        compared = {name: paired(first, of_arm, name, FORMS[name], INTERVAL_SEEDS) for name in DIFFERENCES}
        lines.append({"arm": arm} | compared)
    return lines if of_unequal_steps(runs) else [without_equal_steps(line) for line in lines]


def of_unequal_steps(runs: Sequence[Run]) -> bool:
    """Whether some runs have more steps than others."""
    return any(points(run.rows, None, "steps")[0][-1] > step_budget(runs) for run in runs)


def without_equal_steps(line: Mapping[str, Any]) -> dict[str, Any]:
    return {name: text for name, text in line.items() if name != "equal steps"}


def measures(runs: Sequence[Run]) -> dict[str, dict[int, dict[str, float]]]:
    """Arm -> seed -> column of the table -> value of the run; nan if nothing was measured."""
    steps, tokens = step_budget(runs), token_budget(runs)
    found: dict[str, dict[int, dict[str, float]]] = {}
    for run in runs:
        by_step, by_token = points(run.rows, None, "steps"), points(run.rows, None, "tokens")
        end, answers = run.rows[-max(len(run.rows) // 4, 1) :], last_answers(run.rows)
        measured = {
            "before": by_step[1][0],
            "after": by_step[1][-1],
            "equal steps": float(np.interp(steps, *by_step)),
            "equal tokens": float(np.interp(tokens, *by_token)),
            "tokens": total(run.rows, "dynamic_sampling/generated_tokens"),
            "length": answers.get("response_length/mean"),
            "cut off": answers.get("response_length/clip_ratio"),
            "trained length": mean(run.rows, "response_length/mean"),
            "trained cut off": mean(run.rows, "response_length/clip_ratio"),
            "clipped": run.means.get("actor/pg_clipfrac"),
            "entropy": mean(end, "actor/entropy"),
            "uniform": mean(end, "dynamic_sampling/uniform_share"),
            "mismatch": run.means.get("rollout_corr/logprob_abs_diff"),
        }
        measured = {name: np.nan if value is None else value for name, value in measured.items()}
        found.setdefault(run.arm, {})[run.seed] = measured
    return found


def last_answers(rows: Sequence[Row]) -> Row:
    """Length and cut-off share of the last evaluation that measured them, means over the task sets; or nothing."""
    answers = ({name: value for name, value in row.items() if "/response_length/" in name} for row in reversed(rows))
    last = next(filter(None, answers), {})
    metrics = {"response_length/" + name.rpartition("/")[2] for name in last}
    return {
        metric: float(np.mean([value for name, value in last.items() if name.endswith(metric)])) for metric in metrics
    }


def draw(name: str, runs: Sequence[Run], panels: Sequence[tuple[str, str | None, str]], path: Path) -> None:
    """The curves of all arms: means over seeds, held-out accuracy shaded from minimum to maximum."""
    of_axis = {axis: timed(runs) if axis == "seconds" else runs for axis in AXES}
    panels = [panel for panel in panels if of_axis[panel[2]]]
    rows = -(-len(panels) // COLUMNS)
    columns = min(COLUMNS, len(panels))
    figure = empty_figure(figsize=(5 * columns, 3.7 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    figure.suptitle(name)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for (title, metric, axis), axes in zip(panels, grid.flat, strict=False):
        for arm in dict.fromkeys(run.arm for run in runs):
            places, values = mean_curve([run.rows for run in of_axis[axis] if run.arm == arm], metric, axis)
            if not values.size:
                continue
            [line] = axes.plot(places, values.mean(0), marker="." if metric is None else None, label=arm, alpha=0.85)
            if metric is None:
                axes.fill_between(places, values.min(0), values.max(0), alpha=0.12, color=line.get_color())
        axes.set(title=title, xlabel=AXES[axis][0])
        if axis == "tokens":
            axes.xaxis.set_major_formatter(lambda tokens, _: f"{tokens / 1000:g}k")
        if metric is None:
            axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    grid.flat[0].legend(fontsize=8)
    figure.savefig(path, dpi=90)


def mean_curve(runs: Sequence[Sequence[Row]], metric: str | None, axis: str) -> tuple[Any, Any]:
    """Places [N], means over the runs, and values [runs, N] of the steps in which all runs have the metric."""
    curves = []
    for rows in runs:
        steps, values = points(rows, metric, "steps")
        places, _ = points(rows, metric, axis)
        curves.append(dict(zip(steps, zip(places, values, strict=True), strict=True)))
    shared = sorted(set.intersection(*map(set, curves)))
    found = np.array([[curve[step] for step in shared] for curve in curves]).reshape(len(curves), len(shared), 2)
    return found[..., 0].mean(0), found[..., 1]
