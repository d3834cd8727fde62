"""Host: public data sets as prompt files in verl's schema.

    dapo-jax data gsm8k            writes data/gsm8k/train.parquet and data/gsm8k/test.parquet
    dapo-jax data dapo-math-17k    writes data/dapo-math-17k.parquet
    dapo-jax data aime-2024        writes data/aime-2024.parquet; aime-2025 and amc-2023 likewise, from --input
    dapo-jax data sums             writes data/sums/train.parquet and data/sums/heldout.parquet, which it generates

The rows come from the Hugging Face hub or, with --input, from the publisher's files, Parquet or JSON Lines; for gsm8k
the training problems, then the test problems. Each prompt is written once, while DAPO-Math-17k and AIME-2024 are
published with about 100 and 32 copies. Prompts with several answers are left out, and training problems that are also
test problems. A file appears when it is complete, files that exist are kept, and the same rows give the same bytes.
"""

import os
import socket
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dapo_jax.command.command_line import refusals
from dapo_jax.command.help import command_parser
from dapo_jax.data.prompt_files import read_records
from dapo_jax.data.published import FILES, Row, gsm8k_row, make_row, text_of
from dapo_jax.data.rows import prompt_identity
from dapo_jax.data.worked_sums import sum_row, sums
from dapo_jax.errors import InputError, say
from dapo_jax.hub.repositories import data_files
from dapo_jax.rewards.numerals import whole_number

# Around every problem of DAPO-Math-17k and AIME-2024, as their authors publish them (arXiv:2503.14476).
DAPO_PROMPT = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n{problem}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)
SOURCES = {"dapo-math-17k": "math_dapo", "aime-2024": "aime2024", "aime-2025": "aime2025", "amc-2023": "amc23"}
SUMS = 400, 96  # problems to train and to evaluate on
Convert = Callable[[dict[str, Any]], Row | None]  # None leaves a row out


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_parser("dapo-jax data", __doc__)
    parser.add_argument("name", choices=FILES, help="the data set")
    parser.add_argument("--output", type=Path, default=Path("data"), metavar="DIR", help="default: %(default)s")
    parser.add_argument("--input", nargs="+", metavar="FILE", default=[], help="instead of the hub's files")
    parser.add_argument(
        "--problems", nargs=2, type=int, metavar="N", default=SUMS, help="of sums, to train and to evaluate on"
    )
    given = parser.parse_args(arguments)
    with refusals(["data"]):
        for line in convert(given.name, given.output, given.input, given.problems):
            say(line)


def convert(name: str, folder: Path, given: Sequence[str] = (), problems: Sequence[int] = SUMS) -> Iterable[str]:
    """Writes the files of a data set below `folder`, unless they are all there. Yields a text about each.

    Args:
        given: files to read instead of the hub's.
        problems: of sums, to train and to evaluate on.
    """
    outputs, entries = [folder / file for file in FILES[name]], [*given] or [*FILES[name].values()]
    if all(output.exists() for output in outputs):
        yield from (f"{output} exists: to make it again, delete it first" for output in outputs)
        return
    if name == "sums":
        found = sums(*problems, seed=0)
        for output in outputs:
            write_rows([sum_row(terms, output.stem) for terms in found[output.stem]], output)
            yield f"{output}\n  written      {len(found[output.stem])}"
        return
    if "" in entries:
        raise InputError(f"{name} has no files on the hub that are known here: give its file by --input FILE")
    if len(outputs) > 1 and len(entries) != len(outputs):
        raise InputError(f"--input names {len(entries)} files: name one for each of {', '.join(map(str, outputs))}")
    to_row = partial(math_row, data_source=SOURCES[name]) if name in SOURCES else gsm8k_row
    prompts: set[str] = set()
    for place in reversed(range(len(outputs))):  # the test problems first
        rows, counts = distinct_rows(entries if len(outputs) == 1 else [entries[place]], to_row, excluded=prompts)
        prompts |= {prompt_identity(row["prompt"]) for row in rows}
        write_rows(rows, outputs[place])
        yield "\n".join([str(outputs[place]), *(f"  {what:<12} {count}" for what, count in counts.items())])


def distinct_rows(
    entries: Sequence[str], convert: Convert, excluded: Collection[str] = ()
) -> tuple[list[Row], dict[str, int]]:
    """The rows of all files as `convert` makes them, each prompt once, and how many rows went where.

    Files are read in pieces: memory grows with the rows that are kept. A prompt with several answers is left out.

    Args:
        entries: files, or splits on the hub, as in data.train_files.
        excluded: identities of prompts that are left out.

    Raises:
        InputError: the hub does not give the files; the first bad row, by file, row and field; or no row is left.
    """
    counts = dict.fromkeys(("read", "left out", "repeated"), 0)
    kept: dict[str, Row] = {}
    conflicting: set[str] = set()
    for path in chain.from_iterable(data_files(entry, shown=True) for entry in entries):
        for number, record in read_records(path):
            counts["read"] += 1
            if not isinstance(record, dict):
                raise InputError(f"{path} row {number}: must be an object, not {record!r:.60}: write one on each line")
            try:
                row = convert(record)
            except InputError as problem:
                raise InputError(f"{path} row {number}: {problem}") from problem
            if row is None or (identity := prompt_identity(row["prompt"])) in excluded:
                counts["left out"] += 1
                continue
            counts["repeated"] += identity in kept
            if kept.setdefault(identity, row)["reward_model"] != row["reward_model"]:
                conflicting.add(identity)
    rows = [row for identity, row in kept.items() if identity not in conflicting]
    if not rows:
        raise InputError(f"no row is left ({counts}): name other files")
    return rows, {**counts, "conflicting": len(conflicting), "written": len(rows)}


def math_row(record: dict[str, Any], data_source: str) -> Row:
    """A row with a problem and its answer in the form of DAPO's authors, or of most publishers of AIME and AMC.

    A problem in plain text gets DAPO's prompt. Of competitions, the answer is spelled as `math_dapo` compares it: 073
    becomes 73, and 27.0 becomes 27.
    """
    nested, extra_info = record.get("reward_model"), record.get("extra_info")
    truths = nested if isinstance(nested, dict) else record
    if data_source == SOURCES["dapo-math-17k"]:
        answer = text_of(truths, "ground_truth")
    else:
        given = next((truths[name] for name in ("ground_truth", "answer", "Answer") if name in truths), None)
        answer = whole_number(str(given))
        if answer is None:
            raise InputError(f"answer must be a number, not {given!r:.60}: give the file as its publisher ships it")
    place = extra_info.get("index") if isinstance(extra_info, dict) else record.get("id", record.get("ID"))
    return make_row(
        _prompt(record),
        data_source=data_source,
        ground_truth=answer,
        extra_info={"index": None if place is None else str(place)},
    )


def _prompt(record: dict[str, Any]) -> str:
    """The user's message: the only one of a row's chat messages as it is, or DAPO's prompt around its problem."""
    prompt = record.get("prompt")
    if not isinstance(prompt, list):
        return DAPO_PROMPT.format(problem=text_of(record, "problem", "Problem", "question", "prompt"))
    if len(prompt) != 1 or not isinstance(prompt[0], dict) or prompt[0].get("role") != "user":
        raise InputError(f"prompt must be one message of the user, not {prompt!r:.80}: correct the row")
    return text_of(prompt[0], "content")


def write_rows(rows: Sequence[Row], path: Path) -> None:
    """Writes a Parquet file, which appears only when complete, even with several writers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial_file = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    try:
        pq.write_table(pa.Table.from_pylist(list(rows)), partial_file)
        partial_file.replace(path)
    finally:
        partial_file.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
