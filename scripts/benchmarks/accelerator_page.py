"""Host: the accelerator report as a page of markdown."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/, for what its folders share

from markdown_table import markdown_table


def page(report: dict[str, Any]) -> str:
    """The page of a report (accelerator_report.py says what is in it)."""
    parts = [
        "# Accelerator report",
        f"`{report['command']}`, {report['started']}: {report['seconds']:.0f} s of {report['minutes']:g} minutes.",
        verdict(report),
    ]
    if report["small"]:
        parts.append(
            "**Small sizes.** All models are tiny random stand-ins, also where a section is named after 0.5B or 1.5B: "
            "this run shows that everything works, its speeds say nothing about those models."
        )
    sections = report["sections"]
    if sections:
        parts.append(
            _table(
                [
                    {"section": section["title"], "result": section["status"], "seconds": section["seconds"]}
                    for section in sections
                ]
            )
        )
    checks = [
        {
            "section": section["title"],
            "check": check["check"],
            "found": check["found"],
            "wanted": check["wanted"],
            "passed": check["passed"],
        }
        for section in sections
        for check in section["checks"]
    ]
    if checks:
        parts += ["## Checks", _table(checks)]
    for section in sections:
        parts += _section(section)
    return "\n\n".join(parts) + "\n"


def verdict(report: dict[str, Any]) -> str:
    """One line: which sections failed, which were cut short, which have not run yet."""
    failed = [section["name"] for section in report["sections"] if section["status"].startswith("failed")]
    others = [
        f"{section['name']} {section['status']}"
        for section in report["sections"]
        if section["name"] not in failed and section["status"] != "passed"
    ]
    lines = [f"Failed: {', '.join(failed)}." if failed else "No section failed.", *(f"{line}." for line in others)]
    if report["to_come"]:
        lines.append(f"Not run yet: {', '.join(report['to_come'])}.")
    return " ".join(lines)


def _section(section: dict[str, Any]) -> list[str]:
    parts = [f"## {section['title']}", *section["notes"]]
    if section["status"] != "passed":
        parts.insert(1, f"**{section['status'][0].upper()}{section['status'][1:]}.**")
    for title, rows in section["tables"].items():
        parts += [f"{title}:", _table(rows)]
    if section["error"]:
        parts += ["The end of its output:", f"~~~~text\n{section['error']}\n~~~~"]
    return parts


def _table(rows: list[dict[str, Any]]) -> str:
    return markdown_table([{name: cell(value, name) for name, value in row.items()} for row in rows])


def cell(value: Any, column: str = "") -> str:
    """A value as a table shows it; shares in percent."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "**NO**"
    if isinstance(value, float):
        return f"{100 * value:.1f} %" if column.startswith("share") else _number(value)
    return " ".join(str(value).replace("|", "\\|").split())


def _number(value: float) -> str:
    """Three digits, more before the point."""
    if value == 0 or abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}" if abs(value) >= 0.001 else f"{value:.1e}"
