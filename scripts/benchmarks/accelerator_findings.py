"""Host: what a section of the accelerator report has found so far, kept in a file while it runs."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np


class Findings:
    """Checks, tables and notes of one section. Every addition is written at once: a killed section keeps them.

    The file is JSON: `checks` (check, found, wanted, passed), `tables` (title -> rows), `notes`, and `data`, which
    other sections read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[str, Any] = {"checks": [], "tables": {}, "notes": [], "data": {}}
        self._save()

    def check(self, check: str, found: Any, wanted: str, passed: bool) -> None:
        """One line of the pass/fail list."""
        line = {"check": check, "found": plain(found), "wanted": wanted, "passed": bool(passed)}
        self._found["checks"].append(line)
        self._save()

    def row(self, table: str, **cells: Any) -> None:
        """One row of a table; the first row names the columns."""
        self._found["tables"].setdefault(table, []).append({name: plain(cell) for name, cell in cells.items()})
        self._save()

    def note(self, text: str) -> None:
        """A sentence above the tables."""
        self._found["notes"].append(text)
        self._save()

    def keep(self, **data: Any) -> None:
        """Values that the report or another section reads."""
        self._found["data"] |= {name: plain(value) for name, value in data.items()}
        self._save()

    def _save(self) -> None:
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(self._found, allow_nan=False), encoding="utf-8")
        partial.replace(self._path)


def plain(value: Any) -> Any:
    """`value` as JSON has it: NumPy scalars as Python's, nan and infinity as text."""
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, np.generic):
        value = value.item()
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
