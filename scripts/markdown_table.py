"""Host: tables in Markdown, as benchmarks print them."""

from collections.abc import Sequence
from typing import Any


def markdown_table(rows: Sequence[dict[str, Any]], *, leave_out: Sequence[str] = ()) -> str:
    """A Markdown table with the keys of the first row as its head; None becomes "-"."""
    names = [name for name in rows[0] if name not in leave_out]
    lines = ["| " + " | ".join(names) + " |", "| " + " | ".join("---" for _ in names) + " |"]
    for row in rows:
        cells = [_cell(row[name]) for name in names]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
