"""Host: prompt files (Parquet, JSON Lines or CSV) to rows."""

import codecs
import csv
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from etils import epath

from dapo_jax.data.columns import Columns, suggestion
from dapo_jax.data.model_files import unreadable
from dapo_jax.data.published import FILES, in_verl_schema
from dapo_jax.data.row_schema import Problem, read_row, without_nulls
from dapo_jax.data.rows import PromptRow
from dapo_jax.errors import InputError
from dapo_jax.hub.names import data_name
from dapo_jax.hub.repositories import data_files

SUFFIXES = (".parquet", ".jsonl", ".json", ".csv", ".tsv")
VERL = Columns()
MAX_REPORTED_PROBLEMS = 10
MAX_BAD_ROWS = 10_000  # of a file: then the rest is not read
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_CONVERSIONS = {
    ".arrow": "convert it by datasets.Dataset.from_file(path).to_parquet(...)",
    ".gz": "unpack it",
    ".zst": "unpack it",
    ".zip": "unpack it",
    ".xlsx": "save it as CSV",
}

logger = logging.getLogger(__name__)


def read_prompt_files(paths: Sequence[str], columns: Columns = VERL, *, names_sources: bool = False) -> list[PromptRow]:
    """The rows of all files, in order; a path may also be an address, or a split on the hub (hf://OWNER/NAME/SPLIT).

    A row has a prompt (text, or a list of {role, content}, which may be JSON text, or what the template makes of it),
    an answer (text, a number, which becomes its shortest text, or any other JSON), `data_source` and, optionally,
    `extra_info`, which further columns join, and `tools` and `chat_template_kwargs` for the chat template.

    Args:
        columns: which column is what.
        names_sources: rows without data_source get the name of their file; else they are bad rows.

    Raises:
        ValueError: bad rows, by file, row and field; or a missing, empty or unknown file.
    """
    rows: list[PromptRow] = []
    problems: list[str] = []
    for file, (entry, path) in ((file, (name, path)) for file, name in enumerate(paths) for path in data_files(name)):
        source = source_name(entry) if names_sources else ""
        faults: list[tuple[int, Any, Problem]] = []
        num_bad = num_read = num_parsed = 0
        for number, record in read_records(path):
            if num_bad >= MAX_BAD_ROWS:
                break
            num_read += 1
            if columns == VERL:
                record = in_verl_schema(entry, record)
            if path.suffix == ".parquet" and isinstance(record, dict):
                record = without_nulls(record, columns)
            row, row_problems = read_row(record, columns, f"{path} row {number}", source=source, file=file)
            num_bad += row is None
            faults += [(number, record, problem) for problem in row_problems]
            if row is not None:
                rows.append(row)
                given = None if columns.prompt_template else record[columns.prompt_of(record)]
                num_parsed += not isinstance(row.prompt, str) and isinstance(given, str)
        problems += _described(path, faults, num_read)
        if num_parsed:
            logger.warning(
                "%s: %s of %d rows holds chat messages as JSON text: they are taken as messages, not as plain text",
                path,
                columns.prompt_key,
                num_parsed,
            )
    if problems:
        listed = "\n  ".join(problems[:MAX_REPORTED_PROBLEMS])
        raise InputError(f"bad rows in prompt files (the first row is 1):\n  {listed}")
    if not rows:
        raise InputError(f"prompt files {[str(path) for path in paths]} hold no rows: name files that do")
    return rows


def source_name(entry: str) -> str:
    """The data_source of the rows of an entry of data.train_files that have none: OWNER/NAME, or the file's name."""
    name = data_name(entry)
    return name.repository if name is not None else re.sub(r"-\d+-of-\d+$", "", PurePosixPath(entry).stem)


def source_names(entries: Sequence[str]) -> list[str]:
    """A name for each entry of data.train_files: its `source_name`, with the place of the entry if several share it.

    All have their places if one of these is the name of another.
    """
    names = [source_name(entry) for entry in entries]
    placed = [f"{name}_{place}" for place, name in enumerate(names, start=1)]
    found = [name if names.count(name) == 1 else other for name, other in zip(names, placed, strict=True)]
    return found if len({*found}) == len(found) else placed


def _described(path: Path | epath.Path, faults: Sequence[tuple[int, Any, Problem]], num_read: int) -> list[str]:
    """One line per fault of a file; and one with its columns and how to read them, if all rows lack one.

    Args:
        faults: row, record and what is wrong with it. The same kind is listed once.
    """
    counts, lines, missing, other = Counter(problem.kind for *_, problem in faults), [], set(), {}
    first: dict[str, tuple[int, Any, Problem]] = {}
    for fault in faults:
        first.setdefault(fault[2].kind, fault)
    for kind, (number, record, problem) in first.items():
        count, where = counts[kind], f"{path} row {number}"
        if count > 1:
            where += f" and {count - 1} more of {num_read} rows"
            where = f"{path}, all {num_read} rows" if count == num_read else where
        lines.append(f"{where}: {problem.text}")
        if problem.missing and count == num_read:
            other = record
            missing.add(problem.missing)
    return [*lines, f"{path} has the columns {suggestion(other, missing)}"] if missing else lines


def read_records(path: Path | epath.Path) -> Iterator[tuple[int, Any]]:
    """(row number from 1, decoded row) of one file; an undecodable line becomes its error."""
    if not path.is_file() or path.suffix not in SUFFIXES:
        raise InputError(f"prompt file {path} {_wrong_path(path)}")
    if isinstance(path, Path) and not os.access(path, os.R_OK):
        raise InputError(f"prompt file {path} cannot be read by this user: change its permissions")
    if path.suffix == ".parquet":
        return _parquet_records(path)
    return _table_records(path) if path.suffix in (".csv", ".tsv") else _json_lines_records(path)


def _parquet_records(path: Path | epath.Path) -> Iterator[tuple[int, Any]]:
    try:
        with path.open("rb") as source, pq.ParquetFile(source) as file:
            batches = map(arrow_records, file.iter_batches(batch_size=1024))
            yield from enumerate((record for batch in batches for record in batch), start=1)
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        raise unreadable(path, error) from error


def arrow_records(batch: pa.RecordBatch | pa.Table) -> list[dict[str, Any]]:
    """The rows of a batch. A number in 32 or 16 bits reads as it was written: 0.1, not 0.10000000149."""
    records = batch.to_pylist()
    for column in batch.schema:
        if "float" in str(column.type):  # one of 64 bits is a "double"
            for record in records:
                record[column.name] = _as_written(column.type, record[column.name])
    return records


def _as_written(kind: pa.DataType, value: Any) -> Any:
    if isinstance(value, dict):
        return value | {field.name: _as_written(field.type, value[field.name]) for field in kind}
    if isinstance(value, tuple):  # a key of a map, and its value
        return tuple(_as_written(field.type, part) for field, part in zip(kind, value, strict=True))
    if isinstance(value, list):
        return [_as_written(kind.field(0).type, part) for part in value]
    narrow = pa.types.is_float16(kind) or pa.types.is_float32(kind)
    return value if value is None or not narrow else float(str(kind.to_pandas_dtype()(value)))


def _table_records(path: Path | epath.Path) -> Iterator[tuple[int, Any]]:
    """The rows below the header of a CSV file (.tsv: with tabs); every value is text."""
    number = 0
    try:
        texts = (line.decode() for line in _lines(path))
        rows = csv.reader(texts, delimiter="\t" if path.suffix == ".tsv" else ",", strict=True)
        header = next(rows, [])
        if repeated := {name for name in header if header.count(name) > 1}:
            raise InputError(f"prompt file {path} has several columns {', '.join(sorted(repeated))}: rename them")
        for number, cells in enumerate(filter(None, rows), start=1):
            fault = f"has {len(cells)} cells, the header has {len(header)}: put cells with commas or tabs into quotes"
            yield number, dict(zip(header, cells, strict=True)) if len(cells) == len(header) else InputError(fault)
    except UnicodeDecodeError as error:
        yield number + 1, error
    except csv.Error as error:
        yield number + 1, InputError(f"is no row of a CSV file ({error}): correct its quotes")


def _json_lines_records(path: Path | epath.Path) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(_lines(path), start=1):
        if number == 1 and line.startswith(b"["):
            raise InputError(
                f"prompt file {path} is one JSON list: write one object on each line (JSON Lines), for example "
                f"by jq -c '.[]' {path}"
            )
        if line.strip():
            try:
                yield number, json.loads(line.decode())
            except (ValueError, RecursionError) as error:
                yield number, error


def _lines(path: Path | epath.Path) -> Iterator[bytes]:
    """The lines of a file, without a byte order mark."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines):
            if number == 0 and (line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in line[:4]):
                raise InputError(
                    f"prompt file {path} is UTF-16 text: save it as UTF-8 (iconv -f UTF-16 -t UTF-8 {path})"
                )
            yield line if number else line.removeprefix(codecs.BOM_UTF8)


def _wrong_path(path: Path | epath.Path) -> str:
    """What is wrong with a path that is no file, or does not end in one of SUFFIXES, and the fix."""
    if path.is_dir():
        files = {suffix: sorted(file.name for file in path.iterdir() if file.suffix == suffix) for suffix in SUFFIXES}
        found = next((names for names in files.values() if names), [])
        if not any(file.suffix == ".arrow" for file in path.iterdir()) or files.get(".parquet"):
            there = f"name its files, {', '.join(found[:5])}" if found else f"it has no {' or '.join(SUFFIXES)} files"
            return f"is a directory: {there}"
        return "is a directory of the library datasets: convert it by datasets.load_from_disk(path).to_parquet(...)"
    name = str(path)
    if _HUB_NAME.fullmatch(name) and path.suffix not in (*SUFFIXES, *_CONVERSIONS) and not path.parent.exists():
        cure = f"name a split of it, hf://{name}/SPLIT or hf://{name}/CONFIG/SPLIT"
        if found := [one for one, files in FILES.items() if any(f"/{name}/" in split for split in files.values())]:
            cure += f", or the files that `dapo-jax data {found[0]}` writes"
        return (
            f"does not exist; if {name} is a data set of the Hugging Face hub, {cure} in data.train_files or "
            "data.val_files"
        )
    if path.suffix not in SUFFIXES and (path.suffix or path.exists()):
        cure = _CONVERSIONS.get(path.suffix, "convert it")
        return f"ends in {path.suffix!r}, must end in one of {', '.join(SUFFIXES)}: {cure}"
    if made := [one for one, files in FILES.items() if any(name.endswith(f"/{file}") for file in files)]:
        return f"does not exist: `dapo-jax data {made[0]}` writes it to data/, or correct the path"
    return f"{'is not a file' if path.exists() else 'does not exist'}: correct the path or prepare the data"
