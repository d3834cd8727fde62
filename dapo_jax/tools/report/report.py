"""Host: the command that explains a run in one HTML page.

    dapo-jax report RUN [NAME=RUN ...] [--output FILE.html]

RUN is the workdir of a run, finished or not, or the folder of a sweep. Several runs are compared side by side; those
that differ in their seed alone are one, their mean. The page needs no network and no other file (docs/report.md).
"""

import sys
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from dapo_jax.command.command_line import refusals
from dapo_jax.command.help import command_parser
from dapo_jax.errors import InputError, say
from dapo_jax.monitor.console import aligned
from dapo_jax.tools.report.page import page
from dapo_jax.tools.report.read import read_run, runs_of
from dapo_jax.tools.report.seeds import compared, grouped

_NAME = "report.html"


def report(runs: Sequence[tuple[str, str]], output: Path | None = None, *, replayed: str = "") -> Path:
    """Writes the report on runs, given by name ("": the directory's) and workdir; prints a table of several.

    Args:
        output: the file; None is report.html, in the folder that is given, and here for several.
        replayed: what a replay of a step has found, to be shown.

    Returns:
        The path of the report.

    Raises:
        InputError: a workdir is not one, two runs have the same name, or the file cannot be written.
    """
    columns = grouped([read_run(*run) for given in runs for run in runs_of(*given)])
    twice = [name for name, count in Counter(run.name for run in columns).items() if count > 1]
    if twice:
        raise InputError(f"several runs are called {twice[0]}: give each a name of its own, as in first={runs[0][1]}")
    path = output or (Path(runs[0][1]).expanduser() / _NAME if len(runs) == 1 else Path(_NAME))
    _write(path, page(columns, datetime.now(), replayed))
    if len(columns) > 1 or columns[0].seeds:
        say(aligned([{"arm": run.name} | row for run, row in zip(columns, compared(columns), strict=True)]))
    return path


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="replace")  # lone surrogates cannot be encoded
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error}): choose another file with --output") from error


def _named(given: str) -> tuple[str, str]:
    """Name and workdir of NAME=RUN; a directory whose name has a = may be given alone."""
    name, _, workdir = given.partition("=")
    return (name, workdir) if workdir and not Path(given).exists() else ("", given)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_parser("dapo-jax report", __doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="workdir of a run, or NAME=WORKDIR; folder of a sweep")
    parser.add_argument("--output", type=Path, help="the file to write; RUN/report.html for one run unless given")
    parser.add_argument("--debug", action="store_true", help="show the traceback of a failure")
    arguments = sys.argv[1:] if arguments is None else arguments
    given = parser.parse_args(arguments)
    with refusals(["report", *arguments]):
        say(f"the report is in {report([_named(run) for run in given.runs], given.output)}")
