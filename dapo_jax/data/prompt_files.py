"""Host: prompt files in verl's schema (Parquet or JSON Lines) to rows."""

import codecs
import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from etils import epath

from dapo_jax.data.other_files import describe_columns, wrong_path
from dapo_jax.data.published import in_verl_schema
from dapo_jax.data.row_schema import Problem, read_row, without_nulls
from dapo_jax.data.rows import PromptRow
from dapo_jax.errors import InputError
from dapo_jax.hub.repositories import data_files
from dapo_jax.models.model_files import unreadable

MAX_REPORTED_PROBLEMS = 10
MAX_BAD_ROWS = 10_000  # of a file: then the rest is not read

logger = logging.getLogger(__name__)


def read_prompt_files(paths: Sequence[str], *, prompt_key: str = "prompt") -> list[PromptRow]:
    """The rows of all files, in order; a path may also be an address, or a split on the hub (hf://OWNER/NAME/SPLIT).

    A row has `prompt` (text, or a list of {role, content}, which may be JSON text; `prompt_key` names another column),
    `data_source`, `reward_model.ground_truth` (text, a number, which becomes its shortest text, or any other JSON) and,
    optionally, `extra_info`, and `tools` and `chat_template_kwargs` for the chat template.

    Raises:
        ValueError: bad rows, by file, row and field; or a missing, empty or unknown file.
    """
    rows: list[PromptRow] = []
    problems: list[str] = []
    for source, path in ((name, file) for name in paths for file in data_files(name)):
        bad_rows, num_read, num_parsed = _BadRows(path), 0, 0
        for number, record in read_records(path):
            if bad_rows.count >= MAX_BAD_ROWS:
                break
            num_read += 1
            record = in_verl_schema(source, record)
            if path.suffix == ".parquet" and isinstance(record, dict):
                record = without_nulls(record, prompt_key)
            row, row_problems = read_row(record, prompt_key, f"{path} row {number}")
            bad_rows.add(number, record, row_problems)
            if row is not None:
                rows.append(row)
                num_parsed += not isinstance(row.prompt, str) and isinstance(record[prompt_key], str)
        problems += bad_rows.lines(num_read)
        if num_parsed:
            logger.warning(
                "%s: %s of %d rows holds chat messages as JSON text: they are taken as messages, not as plain text",
                path,
                prompt_key,
                num_parsed,
            )
    if problems:
        listed = "\n  ".join(problems[:MAX_REPORTED_PROBLEMS])
        raise InputError(f"bad rows in prompt files (the first row is 1):\n  {listed}")
    if not rows:
        raise InputError(f"prompt files {[str(path) for path in paths]} hold no rows: name files that do")
    return rows


@dataclass
class _Fault:
    """A kind of problem: the first row with it, and the number of such rows."""

    number: int
    record: Any
    text: str
    count: int = 1


class _BadRows:
    """What is wrong with the rows of a file. The same fault is listed once."""

    def __init__(self, path: Path | epath.Path) -> None:
        self.path, self.count = path, 0
        self._faults: dict[str, _Fault] = {}

    def add(self, number: int, record: Any, problems: Sequence[Problem]) -> None:
        self.count += bool(problems)
        for problem in problems:
            if problem.kind in self._faults:
                self._faults[problem.kind].count += 1
            else:
                self._faults[problem.kind] = _Fault(number, record, problem.text)

    def lines(self, num_read: int) -> list[str]:
        """One line per fault; and one with the columns of the file, if all rows lack one."""
        lines, other_schema = [], None
        for fault in self._faults.values():
            line = f"{self.path} row {fault.number}"
            if fault.count > 1:
                line += f" and {fault.count - 1} more of {num_read} rows"
                line = f"{self.path}, all {num_read} rows" if fault.count == num_read else line
            lines.append(f"{line}: {fault.text}")
            if isinstance(fault.record, dict) and " is missing, " in fault.text and fault.count == num_read:
                other_schema = f"{self.path} has the {describe_columns(fault.record)}"
        return lines if other_schema is None else [*lines, other_schema]


def read_records(path: Path | epath.Path) -> Iterator[tuple[int, Any]]:
    """(row number from 1, decoded row) of one file; an undecodable line becomes its error."""
    readers = {".parquet": _parquet_records, ".jsonl": _json_lines_records, ".json": _json_lines_records}
    if not path.is_file() or path.suffix not in readers:
        raise InputError(f"prompt file {path} {wrong_path(path, readers)}")
    if isinstance(path, Path) and not os.access(path, os.R_OK):
        raise InputError(f"prompt file {path} cannot be read by this user: change its permissions")
    return readers[path.suffix](path)


def _parquet_records(path: Path | epath.Path) -> Iterator[tuple[int, Any]]:
    try:
        with path.open("rb") as source, pq.ParquetFile(source) as file:
            batches = (_records(batch) for batch in file.iter_batches(batch_size=1024))
            yield from enumerate((record for batch in batches for record in batch), start=1)
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        raise unreadable(path, error) from error


def _records(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """The rows of a batch. A ground truth in 32 or 16 bits reads as it was written: 0.1, not 0.10000000149."""
    records = batch.to_pylist()
    column = batch.schema.field("reward_model").type if "reward_model" in batch.schema.names else pa.null()
    if pa.types.is_struct(column) and column.get_field_index("ground_truth") >= 0:
        kind = column.field("ground_truth").type
        if pa.types.is_float16(kind) or pa.types.is_float32(kind):
            for record in records:
                reward_model = record["reward_model"] or {}
                if reward_model.get("ground_truth") is not None:
                    reward_model["ground_truth"] = float(str(kind.to_pandas_dtype()(reward_model["ground_truth"])))
    return records


def _json_lines_records(path: Path | epath.Path) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
                if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in line[:4]:
                    raise InputError(
                        f"prompt file {path} is UTF-16 text: save it as UTF-8 (iconv -f UTF-16 -t UTF-8 {path})"
                    )
                if line.startswith(b"["):
                    raise InputError(
                        f"prompt file {path} is one JSON list: write one object on each line (JSON Lines), for example "
                        f"by jq -c '.[]' {path}"
                    )
            if line.strip():
                try:
                    yield number, json.loads(line.decode())
                except (ValueError, RecursionError) as error:
                    yield number, error
