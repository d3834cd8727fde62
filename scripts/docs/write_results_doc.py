"""Writes the tables of docs/results/*.md from the reports of run_ablation.py and compare_trl.py.

    python scripts/docs/write_results_doc.py

The text between `<!-- NAME -->` and `<!-- end -->` becomes the table of docs/results/NAME.json, below its command.
"""

import functools
import json
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/, for what its folders share

from markdown_table import markdown_table
from script_ends import write_page

DOCS = Path(__file__).resolve().parents[2] / "docs"
TABLE = re.compile(r"<!-- (\w+) -->\n.*?<!-- end -->", re.DOTALL)


def pages() -> list[Path]:
    """The pages with tables, in the order in which docs/results.md links to them."""
    names = dict.fromkeys(re.findall(r"\]\(results/(\w+)\.md", (DOCS / "results.md").read_text()))
    found = [DOCS / "results" / f"{name}.md" for name in names]
    return [page for page in found if TABLE.search(page.read_text())]


def document(page: Path) -> str:
    """The page with its tables as the reports have them."""
    return TABLE.sub(lambda found: f"<!-- {found[1]} -->\n{_section(found[1])}\n<!-- end -->", page.read_text())


def _report(name: str) -> dict[str, Any]:
    return json.loads((DOCS / "results" / f"{name}.json").read_text())


def _section(name: str) -> str:
    report = _report(name)
    runs = report["runs"]
    seeds = ", ".join(str(seed) for seed in sorted({run["seed"] for run in runs}))
    found = dict.fromkeys(f"{library} {version}" for run in runs for library, version in run["versions"].items())
    machines = " or ".join(dict.fromkeys(run["machine"] for run in runs))
    facts = [f"Seeds {seeds}", ", ".join(found), machines]
    if "equal steps" in report["table"][0]:
        facts.append(f"equal steps: after {report['step_budget']:.0f}")
    if len(report["table"]) > 1:
        facts.append(f"equal tokens: after {report['token_budget']:.0f}")
    if report["deviation_between_seeds"] is not None:
        facts.append(f"standard deviation of `after` between seeds {report['deviation_between_seeds']:.3f}")
    facts += [
        f"{run['arm']} with seed {run['seed']} ended with an error after step {run['rows']['step'][-1]:.0f}"
        for run in runs
        if run.get("exit_code")
    ]
    facts.append(f"[numbers]({name}.json), [all curves]({name}.png)")
    tables = markdown_table(report["table"])
    if differences := report.get("differences"):
        first = report["table"][0]["arm"]
        tables += f"\n\nDifferences from {first}, over pairs with the same seed:\n\n{markdown_table(differences)}"
    return f"{tables}\n\n{'; '.join(facts)}.\n\n![{name}: held-out accuracy during training]({name}_accuracy.png)"


if __name__ == "__main__":
    for page in pages():
        write_page(page, functools.partial(document, page), __doc__)
