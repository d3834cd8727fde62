"""Writes the tables of docs/results.md from the files of run_ablation.py and compare_trl.py in docs/results/.

    python scripts/docs/write_results_doc.py

The text between `<!-- NAME -->` and `<!-- end -->` is replaced by the table of docs/results/NAME.json; its command is
above it.
"""

import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/, for what its folders share

from markdown_table import markdown_table
from script_ends import write_page

DOCS = Path(__file__).resolve().parents[2] / "docs"
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
    facts = [f"Seeds {seeds}", ", ".join(found), machines]
    if len(report["table"]) > 1:
        facts.append(f"equal tokens: after {report['token_budget']:.0f}")
    if report["deviation_between_seeds"] is not None:
        facts.append(f"standard deviation of `after` between seeds {report['deviation_between_seeds']:.3f}")
    facts += [
        f"{run['arm']} with seed {run['seed']} ended with an error after step {run['rows'][-1]['step']:.0f}"
        for run in runs
        if run.get("exit_code")
    ]
    facts.append(f"[numbers](results/{name}.json), [all curves](results/{name}.png)")
    return (
        f"{markdown_table(report['table'])}\n\n{'; '.join(facts)}.\n\n"
        f"![{name}: held-out accuracy during training](results/{name}_accuracy.png)"
    )


if __name__ == "__main__":
    write_page(PAGE, document, __doc__)
