"""Host: the report on one or several runs as one HTML page that needs nothing else."""

import base64
import hashlib
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import jinja2
from markupsafe import Markup

from dapo_jax.monitor.readable import shortened, visible
from dapo_jax.monitor.statistics import HELD_OUT
from dapo_jax.tools.report import tables
from dapo_jax.tools.report.curves import AXES, MANY, Line, draw, last_values, points
from dapo_jax.tools.report.describe import algorithm, facts, findings, held_out
from dapo_jax.tools.report.numbers import alarm_steps, is_on, letter, percent, step_ranges, values
from dapo_jax.tools.report.options import between, from_recipe
from dapo_jax.tools.report.read import RunFiles
from dapo_jax.tools.report.samples import held_out_pairs, trained_pairs
from dapo_jax.tools.report.seeds import bands_of, compared
from dapo_jax.tools.report.tables import efficiency, filter_bar, filter_tables, key_numbers, stage_table
from dapo_jax.tools.report.words import ALARMS, CHARTS, Alarm, Chart

_HERE = Path(__file__).parent


class Figure(NamedTuple):
    chart: Chart
    pictures: Markup  # one per axis
    last: str  # values at the end


class Raised(NamedTuple):
    words: Alarm
    metric: str
    runs: list[tuple[RunFiles, str, int]]  # run, its steps in words, how many


def page(runs: Sequence[RunFiles], written: datetime, replayed: str = "") -> str:
    """The HTML of the report; `replayed`: what a replay of a step has found."""
    script = (_HERE / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    template = _environment().get_template("page.html")
    figures, constant = _figures(runs)
    raised, quiet = _alarms(runs)
    return template.render(
        runs=runs,
        written=f"{written:%Y-%m-%d %H:%M}",
        script=Markup(script),
        style=Markup((_HERE / "page.css").read_text(encoding="utf-8")),
        policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'",
        axes=AXES,
        many=MANY,
        figures=figures,
        constant=constant,
        key_numbers=key_numbers(runs),
        compared=_by_row(compared(runs)) if any(run.seeds for run in runs) else [],
        facts=_by_row([facts(run) for run in runs]),
        filter_tables=filter_tables(runs),
        stages=stage_table(runs),
        efficiency=efficiency(runs),
        raised=raised,
        quiet=quiet,
        held_out_samples={run.name: held_out_pairs(run) for run in runs},
        trained_samples={run.name: trained_pairs(run) for run in runs},
        replayed=visible(replayed),
        origin=from_recipe(runs[0]) if len(runs) == 1 else None,
        differences=[tables.Line(key, meaning, [*cells]) for key, meaning, cells, _ in between(runs)],
    )


def _environment() -> jinja2.Environment:
    """Everything that the template shows is escaped, unless it is Markup."""
    loader = jinja2.FileSystemLoader(_HERE)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    shown = (algorithm, filter_bar, findings, letter, percent)
    environment.globals |= {function.__name__: function for function in shown}
    environment.filters |= {"marked": _marked, "short": lambda text: visible(shortened(text))}
    return environment


def _marked(text: str) -> Markup:
    """The text with options, such as actor.optim.lr, as code."""
    parts = re.split(r"(\b[a-z]\w*(?:\.\w+)+(?:=\w+(?:\.\w+)?)?)", text)
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if index % 2 else part for index, part in enumerate(parts)
    )


def _by_row(columns: Sequence[dict[str, str]]) -> list[tables.Line]:
    """One dict per run as rows of a table."""
    return [tables.Line(name, "", [column[name] for column in columns]) for name in columns[0]]


def _figures(runs: Sequence[RunFiles]) -> tuple[list[Figure], list[str]]:
    """The curves, and the names of the metrics that never changed."""
    figures, constant = [], []
    for chart in (*_held_out_charts(runs), *CHARTS):
        measured = [
            (run, letter(number) if len(runs) > 1 else "", number)
            for number, run in enumerate(runs)
            if values(run.rows, chart.metric)
        ]
        bands = {number: bands_of(run, chart.metric) for run, _, number in measured}
        lines = {
            axis: [
                Line(run.name, number, mark, points(run.rows, chart.metric, axis), bands[number])
                for run, mark, number in measured
            ]
            for axis in AXES
        }
        found = [[value for _, value in values(run.rows, chart.metric)] for run, _, _ in measured]
        if found and all(max(one) - min(one) <= chart.noise for one in found):
            constant.append(f"{chart.title} ({chart.metric})")
        elif pictures := Markup("").join(draw(chart.title, axis, lines[axis]) for axis in AXES):
            figures.append(Figure(chart, pictures, last_values(lines["steps"])))
    return figures, constant


def _held_out_charts(runs: Sequence[RunFiles]) -> list[Chart]:
    found = []
    for metric in dict.fromkeys(metric for run in runs for metric in held_out(run)):
        task, samples = HELD_OUT.fullmatch(metric).groups()  # pyright: ignore[reportOptionalMemberAccess]
        meaning = f"Problems that are never trained on; the mean of {samples} samples each. The number that counts."
        found.append(Chart(f"Held-out accuracy, {task}", metric, "share of responses", meaning))
    return found


def _alarms(runs: Sequence[RunFiles]) -> tuple[list[Raised], list[str]]:
    """The alarms that were raised, with words and steps, and the names of those that never were."""
    steps = [alarm_steps(run.rows) for run in runs]
    raised, quiet = [], []
    for name in dict.fromkeys(name for found in steps for name in found):
        on = [
            (run, step_ranges(found[name]), is_on(run.rows, name))
            for run, found in zip(runs, steps, strict=True)
            if found.get(name)
        ]
        if not on:
            quiet.append(name)
            continue
        words = ALARMS.get(name, Alarm(name, None, "This version does not know this alarm.", "See docs/metrics.md."))
        limit = on[0][0].option(f"monitor.alarms.{words.limit}") if words.limit else None
        meaning = words.meaning.format(limit=f"{limit:g}" if limit is not None else "the limit")
        raised.append(Raised(words._replace(meaning=meaning), f"alarm/{name}", on))
    return raised, quiet
