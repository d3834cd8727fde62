"""Host: draws the curves of one or several runs from their metrics.jsonl into one picture.

    dapo-jax plot WORKDIR [NAME=WORKDIR ...] --output FILE.png [--x steps|tokens|seconds]

WORKDIR may be its metrics.jsonl too. Needs matplotlib: pip install 'dapo_jax[plots]'. Held-out accuracy is the mean
over task sets of eval/*/acc/mean@k.
"""

import io
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

from dapo_jax.command.command_line import refusals
from dapo_jax.command.help import command_parser
from dapo_jax.errors import InputError
from dapo_jax.monitor.records import METRICS, read_rows
from dapo_jax.monitor.tensorboard import MAIN_CURVES
from dapo_jax.run.held_out import mean_accuracy
from dapo_jax.tools.report.numbers import is_number

AXES = {  # name -> label, what a step adds
    "steps": ("training steps", None),
    "tokens": ("tokens sampled", "dynamic_sampling/generated_tokens"),
    "seconds": ("seconds of training", "timing_s/step"),
}
Row = Mapping[str, float]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_parser("dapo-jax plot", __doc__)
    parser.add_argument("runs", nargs="+", help="WORKDIR or its metrics.jsonl, or NAME=WORKDIR")
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--x", choices=AXES, default="steps")
    given = parser.parse_args(arguments)
    with refusals(["plot"]):
        draw(given.runs, given.output, given.x)


def draw(runs: Sequence[str], output: Path, x: str) -> None:
    """Draws the panels of `runs` (WORKDIR or NAME=WORKDIR) over the axis `x`, a name of AXES, to a PNG."""
    figure = figure_of(runs, x)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=100)


@contextmanager
def live_curves(workdir: str | Path, *, x: str = "steps", every_s: float = 10.0) -> Iterator[None]:
    """In a notebook: shows the curves of a run below the cell while the body trains it.

    with live_curves(config.workdir):
        result = dx.train(config)
    """
    from IPython.display import Image, Markdown, display  # pyright: ignore[reportMissingImports]

    picture: Any = display(Markdown("*The curves appear after the first step.*"), display_id=True)
    ended = threading.Event()

    def redraw() -> None:
        with suppress(InputError):  # no step has ended
            png = io.BytesIO()
            figure_of([str(workdir)], x).savefig(png, dpi=70)
            picture.update(Image(png.getvalue()))

    def follow() -> None:
        while not ended.wait(every_s):
            redraw()

    thread = threading.Thread(target=follow, name="live_curves", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        redraw()


def figure_of(runs: Sequence[str], x: str) -> Any:
    """The figure that `draw` saves."""
    named = [run.rpartition("=") for run in runs]
    curves = [(name, metrics_of(record_of(workdir, METRICS))) for name, _, workdir in named]
    figure = empty_figure(figsize=(12, 6), layout="constrained")
    grid = figure.subplots(2, 3)
    for name, rows in curves:
        for (title, metric), axes in zip(MAIN_CURVES.items(), grid.flat, strict=True):
            axes.plot(*points(rows, metric, x), marker="." if metric is None else None, label=name)
            axes.set(title=title, xlabel=AXES[x][0])
            axes.grid(alpha=0.3)
    if any("=" in run for run in runs):
        grid.flat[0].legend()
    return figure


def empty_figure(**options: Any) -> Any:
    """A figure of matplotlib's, for files: nothing else keeps it. ImportError without matplotlib."""
    try:
        from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError("matplotlib is missing: pip install 'dapo_jax[plots]'") from error
    return Figure(**options)


def places(rows: Sequence[Row], x: str) -> list[float]:
    """Where each row is on an axis."""
    if (added := AXES[x][1]) is None:
        return [row["step"] for row in rows]
    return list(accumulate(row[added] if is_number(row.get(added)) else 0.0 for row in rows))


def points(rows: Sequence[Row], metric: str | None, x: str) -> tuple[list[float], list[float]]:
    """Where a metric (None: the mean held-out accuracy) was measured, and its values."""
    values = [mean_accuracy(row) if metric is None else row.get(metric) for row in rows]
    found = [(place, value) for place, value in zip(places(rows, x), values, strict=True) if value is not None]
    return [place for place, _ in found], [value for _, value in found]


def record_of(given: str | Path, *names: str) -> Path:
    """The file that is given, or the first of `names` that the work directory has.

    Raises InputError if there is none.
    """
    path = Path(given).expanduser()
    if path.is_file():
        return path
    if not path.exists():
        raise InputError(f"{given} does not exist: give the workdir of a run, or its {' or '.join(names)}")
    for name in names:
        if (path / name).is_file():
            return path / name
    raise InputError(f"{given} has no {' and no '.join(names)}: give the workdir of a run with a finished step")


def metrics_of(path: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl; a last line that is cut off is left out. InputError if it is another file."""
    try:
        rows = read_rows(path)
    except RuntimeError as error:
        raise InputError(f"{error}, or give {METRICS} or its workdir") from error
    if not rows and path.stat().st_size:
        raise InputError(f"{path} does not hold rows of steps: give {METRICS} or its workdir")
    return rows
