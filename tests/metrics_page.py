"""docs/metrics.md, read: the metrics and histograms that it declares."""

import itertools
import re
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
_ROW = re.compile(r"^\| `([^`]+)` \| (.*) \| (.*) \| (.*) \| (.*?)(?: \(([^()]*)\))? \|$", re.MULTILINE)
_PLACEHOLDERS = {
    "score": r"[^/]+",
    "task": r".+",
    "k": r"\d+",
    "n": r"\d+",
    "criterion": r"(?:token|seq_sum|seq_mean|seq_max)_k[123]",
}


@dataclass(frozen=True)
class Metric:
    """One row of the page."""

    name: str
    unit: str
    value: str
    source: str  # whose name and formula it has
    when: str  # when it is logged
    needs: str  # what it needs besides a CPU and files; "" = nothing

    def variants(self) -> list[str]:
        """The names with each choice of their {a|b} parts; placeholders stay."""
        parts = re.split(r"\{([^{}]*\|[^{}]*)\}", self.name)
        choices = [part.split("|") if index % 2 else [part] for index, part in enumerate(parts)]
        return ["".join(chosen) for chosen in itertools.product(*choices)]


def declared(text: str) -> tuple[Metric, ...]:
    """The rows of the tables in a part of the page."""
    return tuple(Metric(*(cell.replace("\\|", "|") for cell in row)) for row in _ROW.findall(text))


def matches(variant: str, name: str) -> bool:
    """Whether `name` is an instance of this variant of a metric."""
    parts = re.split(r"\{(\w+)\}", variant)
    pattern = "".join(_PLACEHOLDERS[part] if index % 2 else re.escape(part) for index, part in enumerate(parts))
    return re.fullmatch(pattern, name) is not None


def find(name: str) -> Metric | None:
    """The metric of this name; None if it is not declared."""
    return next((metric for metric in CATALOGUE if any(matches(variant, name) for variant in metric.variants())), None)


METRICS, _, _rest = PAGE.read_text().partition("\n## Histograms")
CATALOGUE, HISTOGRAMS = declared(METRICS), declared(_rest)
