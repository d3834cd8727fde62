"""Writes the tables of docs/coming_from_verl.md: what each option of verl is here, from dapo_jax/verl/table.py.

    python scripts/docs/write_verl_doc.py

The text outside its marks is written by hand. A test fails if the tables are out of date.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from dapo_jax.verl.options import expanded
from dapo_jax.verl.table import EASYR1, HERE, NOT_HERE, NOT_NEEDED, Entry

PAGE = Path(__file__).resolve().parents[2] / "docs" / "coming_from_verl.md"
TABLES = {"here": HERE, "not needed": NOT_NEEDED, "not here": NOT_HERE, "easyr1": EASYR1}


def document(page: str) -> str:
    """`page` with its tables written."""
    for name, entries in TABLES.items():
        start, end = f"<!-- {name}: written by scripts/docs/write_verl_doc.py -->\n", f"<!-- end of {name} -->\n"
        before, found, rest = page.partition(start)
        _, closed, after = rest.partition(end)
        assert found and closed, f"{PAGE} lacks the marks of the table {name}"
        page = before + start + table(entries) + end + after
    return page


def table(entries: Sequence[Entry]) -> str:
    """Markdown: a line for each entry."""
    ours = any(entry.ours for entry in entries)
    heads = ("verl", "dapo_jax", "what differs") if ours else ("verl", "why")
    lines = [f"| {' | '.join(cells)} |" for cells in (heads, ("---",) * len(heads))]
    for entry in entries:
        cells = [_keys(entry.verl), *([_keys(entry.ours)] if ours else []), entry.note]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _keys(pattern: str) -> str:
    return ", ".join(f"`{key}`" for key in expanded(pattern)) if pattern else "-"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    PAGE.write_text(document(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
