"""Host: prompt files in verl's schema (Parquet or JSON Lines) to rows."""

import codecs
import json
import math
import os
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from etils import epath

from dapo_jax.data.rows import PromptRow
from dapo_jax.errors import InputError
from dapo_jax.models.model_files import unreadable
from dapo_jax.places import is_address, place_of

MAX_REPORTED_PROBLEMS = 10
MAX_NESTING = 100  # levels of lists and objects in a row


def read_prompt_files(
    paths: Sequence[str], *, prompt_key: str = "prompt", max_samples: int = -1
) -> list[PromptRow]:
    """The rows of all files, in order; only the first `max_samples` of them unless it is -1.

    A row has `prompt` (text, or a list of {role, content}; `prompt_key` names another column), `data_source`,
    `reward_model.ground_truth` (text, or a number, which becomes its shortest text) and, optionally, `extra_info`.

    Raises:
        ValueError: naming file, row and field of the first bad rows; or a missing, empty or unknown file.
    """
    if max_samples != -1 and max_samples < 1:
        raise InputError(f"max_samples={max_samples} must be -1 (all rows) or at least 1: correct it")
    rows: list[PromptRow] = []
    problems: list[str] = []
    for path in (place_of(path) if is_address(path) else Path(path) for path in paths):
        for number, record in read_records(path):
            if len(rows) == max_samples or len(problems) >= MAX_REPORTED_PROBLEMS:
                break
            origin = f"{path} row {number}"
            row, row_problems = _prompt_row(record, prompt_key, origin)
            problems += [f"{origin}: {problem}" for problem in row_problems]
            if row is not None:
                rows.append(row)
    if problems:
        raise InputError("bad rows in prompt files (the first row is 1):\n  " + "\n  ".join(problems))
    if not rows:
        raise InputError(f"prompt files {[str(path) for path in paths]} hold no rows: name files that do")
    return rows


def read_records(path: Path | epath.Path) -> Iterator[tuple[int, Any]]:
    """(row number from 1, decoded row) of one file; an undecodable line comes as its error."""
    readers = {".parquet": _parquet_records, ".jsonl": _json_lines_records, ".json": _json_lines_records}
    if path.suffix not in readers:
        raise InputError(
            f"prompt file {path} ends in {path.suffix!r}, must end in one of {', '.join(readers)}: convert it"
        )
    if not path.is_file():
        state = "is not a file" if path.exists() else "does not exist"
        raise InputError(f"prompt file {path} {state}: correct the path or prepare the data")
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
    """The rows of a batch. A ground truth in 32 or 16 bits is what was written: 0.1, not 0.10000000149."""
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
                if line.startswith(b"["):
                    raise InputError(f"prompt file {path} is one JSON list: write one object on each line (JSON Lines)")
            if line.strip():
                try:
                    yield number, json.loads(line.decode())
                except (ValueError, RecursionError) as error:
                    yield number, error


def _prompt_row(record: Any, prompt_key: str, origin: str) -> tuple[PromptRow | None, list[str]]:
    """The row, or None and what is wrong with it."""
    if not isinstance(record, dict):
        found = record if isinstance(record, Exception) else f"a {type(record).__name__}"
        return None, [f"must be a JSON object, not {found}: write one object on each line"]
    unfit = next((f"{key} {rule}" for key, value in record.items() if (rule := _unfit(value)) is not None), None)
    if unfit is not None:
        return None, [unfit]
    reward_model, extra_info = record.get("reward_model"), record.get("extra_info")
    prompt: Any = record.get(prompt_key)
    data_source: Any = record.get("data_source")
    ground_truth: Any = reward_model.get("ground_truth") if isinstance(reward_model, dict) else None
    extra_info = {} if extra_info is None else extra_info
    problems = []
    if not (_is_text(prompt) or _is_chat(prompt)):
        problems.append(
            f"{prompt_key} {_found(prompt)}, must be non-empty text or a list of messages, each with text as "
            "role and content: correct the row or set data.prompt_key to the column that holds the prompt"
        )
    if not _is_text(data_source):
        problems.append(f"data_source {_found(data_source)}, must be non-empty text: name the row's task")
    if not (_is_text(ground_truth) or _is_finite_number(ground_truth)):
        problems.append(
            f"reward_model.ground_truth {_found(ground_truth)}, must be non-empty text or a finite number: "
            "write the expected answer as reward_model={'ground_truth': answer}"
        )
    if not isinstance(extra_info, dict):
        problems.append(f"extra_info {_found(extra_info)}, must be an object: write one or leave it out")
    if problems:
        return None, problems
    if not isinstance(prompt, str):  # a Parquet column gives every message the union of all keys
        prompt = tuple({key: value for key, value in entry.items() if value is not None} for entry in prompt)
    truth = ground_truth if isinstance(ground_truth, str) else _shortest_text(ground_truth)
    return PromptRow(prompt, data_source, truth, extra_info, origin), []


def _shortest_text(number: float | Decimal) -> str:
    """The number in digits, without a point or zeros that it does not need: what a verifier compares as text."""
    text = f"{number if isinstance(number, Decimal) else Decimal(repr(number)):f}"
    if "." in text:
        text = text.rstrip("0").removesuffix(".")
    return "0" if text == "-0" else text


def _unfit(value: Any, nesting: int = 1) -> str | None:
    """Why `value` cannot be handed on as text and plain data, None if it can."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            return f"holds {value[error.start]!r}, half of a character: write the whole character"
        return None
    if not isinstance(value, dict | list):
        return None
    if nesting > MAX_NESTING:
        return f"is nested deeper than {MAX_NESTING} levels: flatten it"
    parts = [*value, *value.values()] if isinstance(value, dict) else value
    return next((rule for part in parts if (rule := _unfit(part, nesting + 1)) is not None), None)


def _found(value: Any) -> str:
    return "is missing" if value is None else f"is {str(value)[:60]!r} ({type(value).__name__})"


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_chat(value: Any) -> bool:
    """True for a non-empty list of messages. The content may be empty, the role may not."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(entry, dict) and _is_text(entry.get("role")) and isinstance(entry.get("content"), str)
            for entry in value
        )
    )


def _is_finite_number(value: Any) -> bool:
    if isinstance(value, int):
        return not isinstance(value, bool)
    return isinstance(value, float | Decimal) and math.isfinite(value)
