"""Host: GSM8K (Cobbe et al., arXiv:2110.14168) as prompt files.

    python scripts/data/prepare_gsm8k.py --train train.jsonl --test test.jsonl --output 'data/gsm8k/{split}.parquet'
    python scripts/data/prepare_gsm8k.py --download

Reads the publisher's JSON Lines (github.com/openai/grade-school-math) or the Parquet files of openai/gsm8k on the
Hugging Face hub, with fields `question` and `answer`, which ends in `#### 72`. The prompt is the question with verl's
instruction. The ground truth is the number without thousands commas; the verifier is `gsm8k`. Training questions that
are also test questions are left out.
"""

if __name__ == "__main__":  # the imports below take seconds
    from dapo_jax.command.interrupts import end_at_once

    end_at_once("prepare_gsm8k")

from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from data_preparation import (
    Dropped,
    Row,
    collect_rows,
    command,
    download,
    parser_of,
    split_path,
    text_field,
    write_rows,
)

from dapo_jax.data.published import ANSWER, GSM8K, gsm8k_columns
from dapo_jax.errors import InputError


def gsm8k_row(record: dict[str, Any], split: str, excluded: Collection[str]) -> Row:
    """A row of verl's schema. Dropped if the question is one of `excluded`.

    Raises:
        ValueError: a field is missing, or the answer does not end in `#### <number>`.
    """
    question, solution = text_field(record, "question"), text_field(record, "answer")
    if question in excluded:
        raise Dropped("questions of the test split")
    found = ANSWER.search(solution)
    if found is None:
        raise InputError(f"answer must end in '#### <number>', not {solution[-60:]!r}: correct the row")
    row = gsm8k_columns(question, solution, found[1])
    return row | {"extra_info": {"split": split, **row["extra_info"]}}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--train", type=Path, metavar="FILE", help="training problems, Parquet or JSON Lines")
    parser.add_argument("--test", type=Path, metavar="FILE", help="test problems")
    parser.add_argument("--download", action="store_true", help=f"take both from {GSM8K} of the Hugging Face hub")
    parser.add_argument(
        "--output",
        default="data/gsm8k/{split}.parquet",
        help="file to write for each split, train and test; .parquet or .jsonl (default: %(default)s)",
    )
    given = parser.parse_args(arguments)
    files = {"test": given.test, "train": given.train}
    if given.download == any(files.values()):
        parser.error("give --train and --test, one of them, or --download alone")
    outputs = {split: split_path(given.output, split) for split in files}
    test_questions: set[str] = set()
    for split in files:
        paths = download(GSM8K, f"main/{split}-*.parquet") if given.download else [files[split]]
        if paths == [None]:
            continue
        excluded = frozenset(test_questions)
        rows, counts = collect_rows(paths, partial(gsm8k_row, split=split, excluded=excluded))
        test_questions |= {row["extra_info"]["question"] for row in rows}
        write_rows(rows, outputs[split])
        print(f"{outputs[split]}\n{counts}")


if __name__ == "__main__":
    command(main)
