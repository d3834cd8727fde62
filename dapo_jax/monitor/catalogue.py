"""Host: every metric and histogram of a run: name, unit, formula, source, and when it is logged.

metric_table.py declares them; docs/metrics.md is written from this module.
"""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from dapo_jax.monitor import metric_table

_PLACEHOLDERS = {
    "score": r"[^/]+",
    "task": r".+",
    "k": r"\d+",
    "n": r"\d+",
    "criterion": r"(?:token|seq_sum|seq_mean|seq_max)_k[123]",
}


@dataclass(frozen=True)
class Metric:
    """One row of the catalogue."""

    name: str
    unit: str
    formula: str
    source: str  # whose name and formula it has
    when: str  # when it is logged
    needs: str = ""  # what a machine needs for it besides a CPU

    def variants(self) -> list[str]:
        """The names with each choice of their {a|b} parts; placeholders stay."""
        parts = re.split(r"\{([^{}]*\|[^{}]*)\}", self.name)
        choices = [part.split("|") if index % 2 else [part] for index, part in enumerate(parts)]
        return ["".join(chosen) for chosen in itertools.product(*choices)]


def _rows(table: str) -> Iterator[Metric]:
    """The rows of a table as metric_table.py describes it. ValueError for a line without three columns."""
    header: list[str] = []
    for line in table.replace("\n    ", " ").splitlines():
        if line.startswith("["):
            header = line.strip("[]").split(" | ")
        elif line and not line.startswith("#"):
            name, unit, formula = re.split(" {2,}", line, maxsplit=2)
            yield Metric(name, unit, formula, *header)


MAIN_CURVES = {  # title -> metric, in the order in which people look; None: held-out accuracy
    "held-out accuracy": None,
    "training accuracy, means of groups": "rollout/acc/mean",
    "share of groups dropped": "train/filter_rate",
    "response length, tokens": "response_length/mean",
    "entropy, nats per token": "actor/entropy",
    "tokens sampled per step": "dynamic_sampling/generated_tokens",
}
CATALOGUE = tuple(_rows(metric_table.METRICS))
HISTOGRAMS = tuple(_rows(metric_table.HISTOGRAMS))


def matches(variant: str, name: str) -> bool:
    """Whether `name` is an instance of this variant of a metric."""
    parts = re.split(r"\{(\w+)\}", variant)
    pattern = "".join(_PLACEHOLDERS[part] if index % 2 else re.escape(part) for index, part in enumerate(parts))
    return re.fullmatch(pattern, name) is not None


def find(name: str) -> Metric | None:
    """The metric of this name; None if it is not declared."""
    return next((metric for metric in CATALOGUE if any(matches(variant, name) for variant in metric.variants())), None)


def sections() -> Iterator[tuple[str, list[Metric]]]:
    """The catalogue by the first part of the names, in its order."""
    for section, metrics in itertools.groupby(CATALOGUE, key=lambda metric: metric.name.split("/")[0]):
        yield section, list(metrics)
