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
    runs = report["runs"]
    seeds = ", ".join(str(seed) for seed in sorted({run["seed"] for run in runs}))
    found = dict.fromkeys(f"{library} {version}" for run in runs for library, version in run["versions"].items())
    machines = " or ".join(dict.fromkeys(run["machine"] for run in runs))
    return (
        f"{markdown_table(report['table'])}\n\n"
        f"`{report['command']}`; seeds {seeds}; {', '.join(found)}; {machines}; "
        f"[numbers](results/{name}.json), [all curves](results/{name}.png).\n\n"
        f"![Held-out accuracy against steps, tokens and seconds](results/{name}_accuracy.png)"
    )


if __name__ == "__main__":
    PAGE.write_text(document(), encoding="utf-8")
    print(PAGE)
