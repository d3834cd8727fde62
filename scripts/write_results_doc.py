"""Writes the tables of docs/results.md from the files that run_ablation.py and compare_trl.py left in docs/results/.

    python scripts/write_results_doc.py

What stands between `<!-- NAME -->` and `<!-- end -->` becomes the table of docs/results/NAME.json, with its command.
"""

import json
import re
from pathlib import Path

from markdown_table import markdown_table

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "results.md"
TABLE = re.compile(r"<!-- (\w+) -->\n.*?<!-- end -->", re.DOTALL)


def document() -> str:
    """The page with its tables as the files have them."""
    return TABLE.sub(lambda found: f"<!-- {found[1]} -->\n{_section(found[1])}\n<!-- end -->", PAGE.read_text())


def _section(name: str) -> str:
    report = json.loads((DOCS / "results" / f"{name}.json").read_text())
    seeds = ", ".join(str(seed) for seed in sorted({run["seed"] for run in report["runs"]}))
    versions = ", ".join(f"{library} {version}" for library, version in report["versions"].items())
    return (
        f"{markdown_table(report['table'])}\n\n"
        f"`{report['command']}`; seeds {seeds}; {versions}; {report['machine']}; "
        f"[numbers](results/{name}.json).\n\n![Curves of this table](results/{name}.png)"
    )


if __name__ == "__main__":
    PAGE.write_text(document(), encoding="utf-8")
    print(PAGE)
