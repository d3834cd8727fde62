"""Host: one report on this machine's accelerator: what it is, whether it computes correctly, how fast, in what memory.

    bash scripts/accelerator_report.sh [--output DIR] [--minutes N] [--sections NAME,NAME] [--after DIR] [--small]

Writes DIR/report.json and DIR/report.md after each section. Each section is a separate process
(accelerator_sections.py): if it crashes or runs out of memory, the others still run, with all of the accelerator's
memory. This process touches no device. The first section checks whether there is an accelerator; without one, or with
--small, all sizes are tiny. A section that no longer fits the time is skipped, and one that is running at the end is
stopped; neither counts as failed. Exit code: 0, 1 if a section failed, 2 if an option is wrong.
"""

import argparse
import datetime
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from accelerator_page import page, verdict

HERE = Path(__file__).parent
NAME = "accelerator_report"
GRACE_S = 5.0  # of the time, for ending a process and writing the report
MOST_WITHOUT_S = 1200.0  # seconds of a section on a machine without an accelerator, which may be busy
ERROR_LINES, ERROR_CHARACTERS = 25, 4000
PASSED, OUT_OF_TIME = "passed", "out of time"


@dataclass(frozen=True)
class Section:
    """A part of the report."""

    name: str
    title: str
    least: float  # seconds that it needs at least: with fewer left it is skipped
    most: float  # seconds after which an accelerator must have hung


SECTIONS = (  # the most important first
    Section("environment", "Environment", 5, 150),
    Section("attention", "Attention kernels", 15, 180),
    Section("tokens", "Tokens and log-probabilities against the CPU", 20, 180),
    Section("training", "Training", 30, 300),
    Section("rollout_0.5b", "Rollout, 0.5B", 30, 240),
    Section("update_0.5b", "Update, 0.5B", 30, 240),
    Section("rollout_1.5b", "Rollout, 1.5B", 30, 240),
    Section("update_1.5b", "Update, 1.5B", 30, 240),
    Section("memory", "Memory against the preflight's forecast", 20, 240),
    Section("rows_0.5b", "Rollout of as many rows as a step has, 0.5B", 40, 240),
    Section("rows_1.5b", "Rollout of as many rows as a step has, 1.5B", 40, 240),
    Section("long_tail", "Slots on equal lengths and on a long tail, 0.5B", 90, 300),
    Section("variants", "Sampling and update with choices undone, 0.5B", 90, 360),
)


class OneLineParser(argparse.ArgumentParser):
    """Reports an error in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def read_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options, with the output folder made. Ends the program with exit code 2 if one is wrong."""
    parser = OneLineParser(
        prog=NAME,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--output", type=Path, default=Path("runs/accelerator_report"), help="new or empty folder")
    parser.add_argument("--minutes", type=float, default=9.0, help="most that all sections take together")
    parser.add_argument("--sections", help="only these, and environment: names with commas between")
    parser.add_argument("--after", type=Path, metavar="DIR", help="take over what passed in this report")
    parser.add_argument("--small", action="store_true", help="tiny sizes, as on a machine without an accelerator")
    args = parser.parse_args(arguments)
    names = [section.name for section in SECTIONS]
    args.sections = names if args.sections is None else args.sections.split(",")
    try:
        args.earlier = (None, {}) if args.after is None else passed_in(args.after)
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(f"--after={args.after} holds no report.json that can be read ({error!r}): give the folder of one")
    if unknown := sorted(set(args.sections) - set(names)):
        parser.error(f"--sections: {', '.join(map(repr, unknown))} unknown: choose from {', '.join(names)}")
    if not 0 < args.minutes < 1e6:  # nan too
        parser.error(f"--minutes={args.minutes:g} must be more than 0")
    if problem := prepare(args.output):
        parser.error(f"--output={args.output} {problem}: choose a new or empty folder")
    return args


def passed_in(folder: Path) -> tuple[Any, dict[str, dict[str, Any]]]:
    """Sizes and devices of an earlier report, and the sections that passed in it, by name, but the environment."""
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    found = {section["name"]: section for section in report["sections"] if section["status"] == PASSED}
    made = report["small"], found.pop("environment")["data"].get("devices")
    note = f"Taken over from {folder}, begun {report['started']}."
    return made, {name: section | {"notes": [note, *section["notes"]]} for name, section in found.items()}


def prepare(folder: Path) -> str:
    """Makes the folder of the report; the reason why it cannot be used, else ''."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            return "is not empty"
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return f"can not be written ({error.strerror})"


def section_command(name: str, folder: Path, *, small: bool) -> list[str]:
    """What runs a section; it writes `folder`/NAME.json."""
    command = [sys.executable, str(HERE / "accelerator_sections.py"), name, "--folder", str(folder)]
    return [*command, "--small"] if small else command


def run_section(section: Section, folder: Path, *, small: bool, deadline: float) -> dict[str, Any]:
    """The section's part of the report; it ends before `deadline`, a time.monotonic()."""
    result: dict[str, Any] = {
        "name": section.name,
        "title": section.title,
        "status": "",
        "seconds": 0.0,
        "checks": [],
        "tables": {},
        "notes": [],
        "data": {},
        "error": "",
    }
    start = time.monotonic()
    left = deadline - start - GRACE_S
    if left < section.least:
        return result | {"status": f"skipped: {OUT_OF_TIME}"}
    most = MOST_WITHOUT_S if small else section.most
    log = folder / f"{section.name}.log"
    code = run_command(section_command(section.name, folder, small=small), log, min(left, most))
    result["seconds"] = round(time.monotonic() - start, 1)
    found = folder / f"{section.name}.json"
    if found.exists():
        result |= json.loads(found.read_text(encoding="utf-8"))
    wrong = [check["check"] for check in result["checks"] if not check["passed"]]
    if code is None and left < most:
        status = f"ended: {OUT_OF_TIME}" if not wrong else f"failed, and {OUT_OF_TIME}"
    elif code is None:
        status = f"failed: no end after {most:.0f} s"
    elif code:
        status = f"failed: exit code {code}"
    elif reason := result["data"].get("skipped"):
        status = f"skipped: {reason}"
    else:
        status = f"failed: {len(wrong)} of {len(result['checks'])} checks" if wrong else PASSED
    return result | {"status": status, "error": "" if code == 0 and not wrong else last_lines(log)}


def run_command(command: Sequence[str], log: Path, seconds: float) -> int | None:
    """Exit code of a command whose output goes to `log`, None if it was ended after `seconds`.

    All processes that it started end with it.
    """
    paths = [str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def last_lines(log: Path) -> str:
    """The end of a section's output."""
    lines = log.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()[-ERROR_LINES:]
    return "\n".join(lines)[-ERROR_CHARACTERS:]


def write(report: dict[str, Any], folder: Path) -> None:
    """The report as JSON and as a page."""
    texts = {"report.json": json.dumps(report, indent=1) + "\n", "report.md": page(report)}
    for name, text in texts.items():
        partial = folder / f"{name}.partial"
        partial.write_text(text, encoding="utf-8")
        partial.replace(folder / name)


def make_report(args: argparse.Namespace, command: str) -> dict[str, Any]:
    """Runs the sections and writes the report after each."""
    start = time.monotonic()
    deadline = start + 60 * args.minutes
    chosen = [section for section in SECTIONS if section.name in {"environment", *args.sections}]
    report: dict[str, Any] = {
        "command": command,
        "started": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
        "minutes": args.minutes,
        "seconds": 0.0,
        "small": args.small,
        "sections": [],
        "to_come": [section.name for section in chosen],
    }
    write(report, args.output)
    made, earlier = args.earlier
    with tempfile.TemporaryDirectory(prefix=f"{NAME}_") as folder:
        for section in chosen:
            print(f"{section.title} ... ", end="", flush=True)
            result = earlier.get(section.name)
            if result is None:
                result = run_section(section, Path(folder), small=report["small"], deadline=deadline)
            else:  # later sections read its data
                Path(folder, f"{section.name}.json").write_text(json.dumps(result), encoding="utf-8")
            print(f"{result['status']} ({result['seconds']:.0f} s)", flush=True)
            if section.name == "environment":  # without an accelerator, or with none that starts
                report["small"] |= result["data"].get("platform", "cpu") == "cpu"
                if made != (report["small"], result["data"].get("devices")):  # of other sizes or devices
                    earlier = {}
            report["sections"].append(result)
            report["to_come"].remove(section.name)
            report["seconds"] = round(time.monotonic() - start, 1)
            write(report, args.output)
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    args = read_arguments(given)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(f"\n{NAME}: ended; {args.output} has the results so far"))
    try:
        report = make_report(args, shlex.join(["bash", "scripts/accelerator_report.sh", *given]))
    except KeyboardInterrupt:
        sys.exit(f"\n{NAME}: ended; {args.output} has the results so far")
    print(f"{verdict(report)} The page: {args.output / 'report.md'}")
    return int(any(section["status"].startswith("failed") for section in report["sections"]))


if __name__ == "__main__":
    sys.exit(main())
