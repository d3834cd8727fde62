"""Host: curves of several runs in one picture, as SVG: axes, raw points, a smoothed line where there are many."""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from markupsafe import Markup

from dapo_jax.tools.plot import AXES, places
from dapo_jax.tools.report.numbers import Row, is_number, number, short_power

WIDTH, HEIGHT = 420, 224
LEFT, RIGHT, TOP, BOTTOM = 54, 24, 10, 38
MANY = 60  # points; more are smoothed


class Point(NamedTuple):
    x: float
    step: int
    value: float | None  # None: not a finite number


class Line(NamedTuple):
    name: str
    run: int  # its number, which chooses colour and dashes
    letter: str  # "" if there is only one run
    points: list[Point]
    band: Mapping[int, tuple[float, float]] = {}  # step -> least and greatest of the seeds

    def edge(self, end: int) -> list[Point]:
        """The lower (0) or upper (1) edge of the band."""
        return [point._replace(value=self.band[point.step][end]) for point in self.points if point.step in self.band]

    def text(self, point: Point) -> str:
        """The value, with the band in brackets."""
        ends = f" ({'–'.join(map(number, self.band[point.step]))})" if point.step in self.band else ""
        return number(point.value) + ends


class Scale(NamedTuple):
    """From values to places in the picture."""

    low: float
    high: float
    first: float
    last: float

    def __call__(self, value: float) -> float:
        return round(self.first + (value - self.low) / (self.high - self.low) * (self.last - self.first), 1)


def points(rows: Sequence[Row], metric: str, axis: str) -> list[Point]:
    """The measured points of a metric along an axis of AXES."""
    return [
        Point(place, row["step"], row[metric] if is_number(row[metric]) else None)
        for place, row in zip(places(rows, axis), rows, strict=True)
        if metric in row
    ]


def draw(title: str, axis: str, lines: Sequence[Line]) -> Markup:
    """The picture of the lines; "" if none has two points."""
    finite = [(point.x, point.value) for line in lines for point in line.points if point.value is not None]
    if len({x for x, _ in finite}) < 2:
        return Markup("")
    highest = max(x for x, _ in finite)
    across = Scale(min(x for x, _ in finite), highest, LEFT, WIDTH - RIGHT)
    edges = [end for line in lines for point in line.points for end in line.band.get(point.step, ())]
    up = Scale(*value_range([*(value for _, value in finite), *edges]), HEIGHT - BOTTOM, TOP)
    shown = [_Drawn.of(line, across, up) for line in lines]
    letters = _letters(shown)
    return Markup(
        '<svg class="x-{axis}" viewBox="0 0 {width} {height}" role="img" tabindex="0" aria-label="{label}" '
        'data-lines="{data}">{grid}{lines}{letters}'
        '<line class="cursor" y1="{top}" y2="{bottom}" hidden=""></line></svg>'
    ).format(
        axis=axis,
        width=WIDTH,
        height=HEIGHT,
        label=f"{title} over {AXES[axis][0]}. {' '.join(map(_summary, lines))}",
        data=json.dumps([one.data for one in shown], separators=(",", ":")),
        grid=_grid(across, up, AXES[axis][0]),
        lines=Markup("").join(one.svg for one in shown),
        letters=letters,
        top=TOP,
        bottom=HEIGHT - BOTTOM,
    )


class _Drawn(NamedTuple):
    svg: Markup
    data: dict  # for the readout under the pointer
    run: int
    end: tuple[float, float]

    @classmethod
    def of(cls, line: Line, across: Scale, up: Scale) -> "_Drawn":
        finite = [(across(point.x), up(point.value), point) for point in line.points if point.value is not None]
        many = len(finite) > MANY
        kept = _thinned(finite) if many else finite
        dots = "".join(f"M{x:g} {y:g}h0" for x, y, _ in kept)
        path, low, high = (
            _broken(_averaged(points) if many else points, across, up)
            for points in (line.points, line.edge(0), line.edge(1)[::-1])
        )
        svg = Markup('<path class="dots r{run}{faint}" d="{dots}"/><path class="line r{run}" d="{path}"/>').format(
            run=line.run % 6, faint=" faint" if many else "", dots=dots, path=path
        )
        if low:
            svg = Markup('<path class="band r{}" d="{}L{}Z"/>').format(line.run % 6, low, high[1:]) + svg
        data = {
            "letter": line.letter,
            "x": [x for x, _, _ in kept],
            "step": [point.step for _, _, point in kept],
            "value": [line.text(point) for _, _, point in kept],
        }
        return cls(svg, data, line.run, (finite[-1][0], finite[-1][1]) if finite else (LEFT, TOP))


def value_range(values: Sequence[float]) -> tuple[float, float]:
    """The range of the upward axis: from 0 unless the values are far from it or below."""
    low, high = min(values), max(values)
    if low >= 0 and low <= 0.6 * high:
        low = 0.0
    if high - low <= 1e-12 * max(abs(low), abs(high)):  # one value
        space = abs(high) / 10 or 1.0
        return low - (space if low else 0.0), high + space
    space = (high - low) / 20
    return low - (space if low else 0.0), high + space


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """At most `most` round numbers from low to high."""
    if high <= low:
        return [low]
    size = 10.0 ** math.floor(math.log10((high - low) / most))
    for factor in (1, 2, 5, 10, 20):
        first, last = math.ceil(low / (size * factor) - 1e-9), math.floor(high / (size * factor) + 1e-9)
        if last - first < most:
            return [index * size * factor for index in range(first, last + 1)]
    return [low, high]


def tick_label(value: float, spacing: float) -> str:
    """A tick with as many digits as its neighbours need: 0.05, 1,500, 20k, 3M, 2e-7."""
    size = max(abs(value), spacing)
    if value == 0:
        return "0"
    if size < 1e-3 or size >= 1e9:
        return short_power(f"{value:.2g}")
    for scale, suffix in ((1e6, "M"), (1e4, "k")):
        if size >= scale:
            unit = scale if suffix == "M" else 1e3
            return f"{value / unit:.{_decimals(spacing / unit)}f}{suffix}"
    return f"{value:,.{_decimals(spacing)}f}"


def _decimals(spacing: float) -> int:
    return max(0, -math.floor(math.log10(spacing) + 1e-9))


def _grid(across: Scale, up: Scale, label: str) -> Markup:
    parts = []
    rows = ticks(up.low, up.high)
    spacing = rows[1] - rows[0] if len(rows) > 1 else abs(rows[0]) or 1.0
    for value in rows:
        y = up(value)
        parts.append(
            Markup(
                '<line class="grid" x1="{}" x2="{}" y1="{}" y2="{}"/><text x="{}" y="{}" class="up">{}</text>'
            ).format(LEFT, WIDTH - RIGHT, y, y, LEFT - 7, y + 4, tick_label(value, spacing))
        )
    columns = ticks(across.low, across.high, 6)
    spacing = columns[1] - columns[0] if len(columns) > 1 else 1.0
    for value in columns:
        parts.append(
            Markup('<text x="{}" y="{}" class="across">{}</text>').format(
                across(value), HEIGHT - BOTTOM + 16, tick_label(value, spacing)
            )
        )
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(Markup('<text x="{}" y="{}" class="across axis">{}</text>').format(middle, HEIGHT - 4, label))
    return Markup("").join(parts)


def _broken(line: Sequence[Point], across: Scale, up: Scale) -> str:
    """A path through the points, with a gap where a value is not finite."""
    path, joined = [], False
    for point in line:
        if point.value is not None:
            path.append(f"{'L' if joined else 'M'}{across(point.x):g} {up(point.value):g}")
        joined = point.value is not None
    return "".join(path)


def _averaged(line: Sequence[Point]) -> list[Point]:
    """Means over neighbours: a twenty-fifth of the points, and at least 5."""
    values, half = [point.value for point in line], max(2, len(line) // 50)
    means = []
    for index, point in enumerate(line):
        near = [value for value in values[max(0, index - half) : index + half + 1] if value is not None]
        means.append(point._replace(value=math.fsum(near) / len(near) if near else None))
    every = max(1, len(means) // (WIDTH - LEFT - RIGHT))
    return means[::every]


def _thinned(drawn: list[tuple[float, float, Point]]) -> list[tuple[float, float, Point]]:
    """The lowest and the highest point of each column of the picture."""
    kept = []
    for _, column in itertools.groupby(drawn, key=lambda point: int(point[0])):
        here = list(column)
        both = {min(here, key=lambda point: point[1]), max(here, key=lambda point: point[1])}
        kept += sorted(both, key=lambda point: point[2].step)
    return kept


def _letters(drawn: Sequence[_Drawn]) -> Markup:
    """The letter of each run at the end of its line, moved apart where they would overlap."""
    placed: list[tuple[float, float]] = []
    texts = []
    for one in sorted(drawn, key=lambda one: one.end[1]):
        x, y = one.end[0] + 8, min(one.end[1] + 4, HEIGHT - BOTTOM)
        for other_x, other_y in placed:  # from the highest to the lowest
            if abs(x - other_x) < 14 and abs(y - other_y) < 12:
                y = other_y + 12
        placed.append((x, y))
        text = Markup('<text x="{}" y="{}" class="letter r{}">{}</text>')
        texts.append(text.format(round(x, 1), round(y, 1), one.run % 6, one.data["letter"]))
    return Markup("").join(texts)


def last_values(lines: Sequence[Line]) -> str:
    """The last value of each line: what the readout shows before a pointer moves."""
    ends: dict[int, list[str]] = {}
    for line in lines:
        for point in [point for point in line.points if point.value is not None][-1:]:
            ends.setdefault(point.step, []).append(f"{line.letter} {line.text(point)}".strip())
    return "; ".join(f"step {step}: {', '.join(values)}" for step, values in ends.items())


def _summary(line: Line) -> str:
    finite = [point for point in line.points if point.value is not None]
    if not finite:
        return f"{line.name}: no number."
    low, high = (choose(finite, key=lambda point: point.value or 0.0) for choose in (min, max))
    return (
        f"{line.name}: {number(finite[0].value)} at step {finite[0].step}, {number(finite[-1].value)} at step "
        f"{finite[-1].step}; lowest {number(low.value)}, highest {number(high.value)}."
    )
