"""Host: code shared by the scripts that prepare data sets. They read public files and write rows in verl's schema.

A row has `prompt` (chat messages), `data_source`, `ability`, `reward_model` (`style`, `ground_truth`) and `extra_info`.
The same input files always give the same bytes.
"""

import argparse
import json
import os
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dapo_jax.data.prompt_files import MAX_REPORTED_PROBLEMS, read_records
from dapo_jax.data.rows import prompt_identity
from dapo_jax.errors import InputError

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/, for what its folders share

from script_ends import command as command

# Around every problem of DAPO-Math-17k and AIME-2024, as their authors publish them (arXiv:2503.14476).
DAPO_PROMPT = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n{problem}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)
WRITERS = (".parquet", ".jsonl")

Row = dict[str, Any]


class Dropped(Exception):
    """A row that is left out; the text is the reason, under which it is counted."""


@dataclass
class Counts:
    """Counts of the rows read: read = duplicates + conflicting + dropped + written."""

    read: int = 0
    duplicates: int = 0  # of an earlier prompt with the same answer
    conflicting: int = 0  # rows of prompts that have several answers, all of which are left out
    dropped: Counter[str] = field(default_factory=Counter)  # by reason
    written: int = 0

    def __str__(self) -> str:
        dropped = sum(self.dropped.values())
        reasons = "".join(f"\n    {count} {reason}" for reason, count in sorted(self.dropped.items()))
        return (
            f"  read         {self.read}\n  duplicates   {self.duplicates}\n  conflicting  {self.conflicting}\n"
            f"  dropped      {dropped}{reasons}\n  written      {self.written}"
        )


def make_row(problem: str, *, data_source: str, ground_truth: str, extra_info: dict[str, Any]) -> Row:
    """A row whose prompt is one message of the user."""
    return {
        "prompt": [{"role": "user", "content": problem}],
        "data_source": data_source,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": extra_info,
    }


def collect_rows(paths: Iterable[Path], convert: Callable[[dict[str, Any]], Row]) -> tuple[list[Row], Counts]:
    """The distinct rows of all files, each as `convert` makes it, in the order in which they first occur.

    Files are read batch by batch: memory grows with the rows that are kept, not with the files. A prompt with two
    different answers is left out altogether.

    Args:
        convert: a row of a file to a row in verl's schema. Dropped leaves it out, ValueError refuses the file.

    Raises:
        ValueError: naming file, row and field of the first bad rows, or that nothing is left.
    """
    counts, problems = Counts(), []
    kept: dict[str, tuple[Row, int]] = {}  # by prompt: its first row, and how many rows it has
    conflicting: set[str] = set()
    for path in paths:
        for number, record in read_records(path):
            if len(problems) >= MAX_REPORTED_PROBLEMS:
                break
            counts.read += 1
            try:
                row = convert(_object(record))
            except Dropped as reason:
                counts.dropped[str(reason)] += 1
                continue
            except ValueError as problem:
                problems.append(f"{path} row {number}: {problem}")
                continue
            identity = prompt_identity(row["prompt"])
            first, repeats = kept.get(identity, (row, 0))
            kept[identity] = first, repeats + 1
            if answer_of(first) != answer_of(row):
                conflicting.add(identity)
    if problems:
        raise InputError("bad rows (the first row is 1):\n  " + "\n  ".join(problems))
    rows = [first for identity, (first, _) in kept.items() if identity not in conflicting]
    counts.conflicting = sum(kept[identity][1] for identity in conflicting)
    counts.duplicates = sum(repeats - 1 for identity, (_, repeats) in kept.items() if identity not in conflicting)
    counts.written = len(rows)
    if not rows:
        raise InputError(f"no row is left from {', '.join(map(str, paths))}: name other files\n{counts}")
    return rows, counts


def dapo_prompt(record: dict[str, Any]) -> str:
    """The user's message of a row: that of its chat messages as it is, or DAPO's prompt around its problem.

    Raises:
        ValueError: the row has neither.
    """
    prompt = record.get("prompt")
    if not isinstance(prompt, list):
        return DAPO_PROMPT.format(problem=text_field(record, "problem", "Problem", "question", "prompt"))
    if len(prompt) != 1 or not isinstance(prompt[0], dict) or prompt[0].get("role") != "user":
        raise InputError(f"prompt must be one message of the user, not {str(prompt)[:80]!r}: correct the row")
    return text_field(prompt[0], "content")


def answer_of(row: Row) -> str:
    """The ground truth of a row in verl's schema."""
    return row["reward_model"]["ground_truth"]


def text_field(record: dict[str, Any], *names: str) -> str:
    """The text of the first of the fields `names` that the record has. ValueError if none is non-empty text."""
    for name in names:
        value = record.get(name)
        if isinstance(value, str) and value.strip():
            return value
    raise InputError(
        f"{' or '.join(names)} must be non-empty text, and the row has {_shown(record, names)}: "
        "give the file as its publisher ships it"
    )


def number_field(record: dict[str, Any], *names: str) -> str:
    """The number in the first of the fields `names` that the record has, in its shortest spelling: 27.0 is "27".

    Raises:
        ValueError: none of them is a finite number, as a number or as text.
    """
    for name in names:
        number = plain_number(record.get(name))
        if number is not None:
            return number
    raise InputError(
        f"{' or '.join(names)} must be a number, and the row has {_shown(record, names)}: "
        "give the file as its publisher ships it"
    )


def plain_number(value: Any) -> str | None:
    """A number, or text that is one, without thousands commas, leading zeros and zero decimals; else None."""
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal | str):
        return None
    try:
        number = Decimal(str(value).strip().replace(",", ""))
    except ArithmeticError:
        return None
    if not number.is_finite() or abs(number.adjusted()) > 100:
        return None
    text = f"{number:f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text in ("-0", "") else text


def write_rows(rows: Sequence[Row], path: Path) -> None:
    """Writes Parquet or JSON Lines, as the suffix says. The file appears only when complete, even with several writers.

    Raises:
        ValueError: another suffix.
    """
    check_output(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    try:
        if path.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(list(rows)), partial)
        else:
            with partial.open("w", encoding="utf-8", newline="\n") as file:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def check_output(path: Path) -> None:
    """ValueError unless the suffix names a format."""
    if path.suffix not in WRITERS:
        raise InputError(f"output {path} must end in one of {', '.join(WRITERS)}: correct its name")


def split_path(pattern: str, split: str) -> Path:
    """The output of one split: `{split}` replaced. ValueError if the pattern lacks it."""
    if "{split}" not in pattern:
        raise InputError(f"output {pattern} must hold {{split}}, which becomes the name of the split: add it")
    path = Path(pattern.replace("{split}", split))
    check_output(path)
    return path


def download(repository: str, pattern: str) -> list[Path]:
    """The files of a data set of the Hugging Face hub that match `pattern`, in the order of their names.

    Raises:
        ValueError: huggingface_hub is not installed, the hub is out of reach, or it has no such file.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise InputError(
            "--download needs the package huggingface_hub: pip install 'dapo_jax[hub]', or give files"
        ) from error
    try:
        folder = Path(snapshot_download(repository, repo_type="dataset", allow_patterns=pattern))
    except Exception as error:  # the library's own, httpx's and the system's have no common class
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise InputError(
            f"--download cannot fetch {pattern} of {repository} from the Hugging Face hub ({reason[0]}): download "
            f"it where there is a network, and give the file"
        ) from error
    files = sorted(folder.glob(pattern))
    if not files:
        raise InputError(f"{repository} of the Hugging Face hub has no file {pattern}: download it by hand")
    return files


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the docstring of the script, unchanged."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def parser_of_files(description: str | None, repository: str) -> argparse.ArgumentParser:
    """The same with FILE... and --download, for `given_or_downloaded`."""
    parser = parser_of(description)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="Parquet or JSON Lines")
    parser.add_argument("--download", action="store_true", help=f"take {repository} of the Hugging Face hub")
    return parser


def add_output_file(parser: argparse.ArgumentParser, default: str) -> None:
    """Adds --output, for `write_one_file`."""
    parser.add_argument(
        "--output", type=Path, default=Path(default), metavar="FILE", help=".parquet or .jsonl (default: %(default)s)"
    )


def write_one_file(
    parser: argparse.ArgumentParser,
    given: argparse.Namespace,
    repository: str,
    pattern: str,
    convert: Callable[[dict[str, Any]], Row],
) -> None:
    """The rows of all files, as `collect_rows` has them, to `given.output`; prints the counts."""
    check_output(given.output)
    rows, counts = collect_rows(given_or_downloaded(parser, given.files, given.download, repository, pattern), convert)
    write_rows(rows, given.output)
    print(f"{given.output}\n{counts}")


def given_or_downloaded(
    parser: argparse.ArgumentParser, files: Sequence[Path], wanted: bool, repository: str, pattern: str
) -> list[Path]:
    """The files of the command line, or those of the hub with --download: exactly one of the two."""
    if bool(files) == wanted:
        parser.error("give either files or --download")
    return download(repository, pattern) if wanted else list(files)


def _object(record: Any) -> dict[str, Any]:
    if isinstance(record, dict):
        return record
    found = record if isinstance(record, Exception) else f"a {type(record).__name__}"
    raise InputError(f"must be a JSON object, not {found}: write one object on each line")


def _shown(record: dict[str, Any], names: Sequence[str]) -> str:
    values = [f"{name}={str(record[name])[:60]!r}" for name in names if record.get(name) is not None]
    return ", ".join(values) or f"the fields {', '.join(record) or 'none'}"
