"""Host: from a record of a prompt file to a row, or to what is wrong with it."""

import base64
import datetime
import decimal
import json
import math
import re
import uuid
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from dapo_jax.data.columns import MISSING, TEMPLATE_COLUMNS, Columns, template_parts, value_at
from dapo_jax.data.rows import PromptRow
from dapo_jax.errors import InputError

MAX_NESTING = 100  # levels of lists and objects in a row
# Text that is like a list of messages, as Python or NumPy prints it, or the JSON of another form of them.
_PRINTED = re.compile(
    r"""\s*(array\()?[\[(]\s*\{(?=.*['"](role|from)['"]\s*:)(?=.*['"](content|value)['"]\s*:)\s*['"].*[\])]\s*""",
    re.DOTALL,
)


class Problem(NamedTuple):
    """What is wrong with a record."""

    kind: str  # the same for the same fault of another record
    text: str  # field, value, rule and fix
    missing: str = ""  # "prompt", "answer" or "source", if the record lacks that


def read_row(
    record: Any, columns: Columns, origin: str, *, source: str = "", file: int = 0
) -> tuple[PromptRow | None, list[Problem]]:
    """The row, or None and what is wrong with the record.

    Args:
        record: a decoded row of a file, or the error of decoding it.
        origin: file and number of the row, for messages.
        source: the data_source of rows without one; "" = they need one.
        file: its place in data.train_files.
    """
    if (problem := _undecoded(record)) is not None:
        return None, [problem]
    for key, value in record.items():
        if (rule := _unfit(value)) is not None:
            return None, [Problem(f"{key} unfit", f"{key} {rule}")]
    if found := [key for key in ("images", "videos") if record.get(key)]:
        return None, [Problem(found[0], f"{found[0]} must be empty, as models read text only: leave out such rows")]
    prompt, problems = _templated(record, columns) if columns.prompt_template else _given(record, columns)
    data_source: Any = source if source and record.get("data_source") is None else record.get("data_source")
    if not _is_text(data_source):
        rule = "must be non-empty text: name the row's task, or name the reward by reward.function"
        problems.append(_problem("data_source", data_source, rule, "source"))
    truth, fits = _ground_truth(value_at(record, columns.answer_key) if columns.answer_key else None)
    if not fits:
        rule = (
            "must be non-empty text, a finite number, true or false, a list, an object or null: write the expected "
            "answer so, or set data.answer_key to the column that holds it"
        )
        problems.append(_problem(columns.answer_key, None if truth is MISSING else truth, rule, "answer"))
    extra_info = _from_json(record.get("extra_info") or {}, dict, lambda found: True)
    if not isinstance(extra_info, dict):
        problems.append(_problem("extra_info", extra_info, "must be an object: write one or leave it out"))
    template_kwargs, faults = _template_kwargs(record, prompt)
    problems += faults
    if problems:
        return None, problems
    if not isinstance(prompt, str):  # a Parquet column gives every message the union of all keys
        prompt = tuple({key: value for key, value in entry.items() if value is not None} for entry in prompt)
    extra_info = columns.others(record) | extra_info
    return PromptRow(prompt, data_source, truth, extra_info, origin, template_kwargs, file), []


def _undecoded(record: Any) -> Problem | None:
    """Why a record is no object."""
    if isinstance(record, UnicodeDecodeError):
        byte = record.object[record.start]
        return Problem("text", f"is not UTF-8 text (byte 0x{byte:02x}; Latin-1?): save the file as UTF-8")
    if isinstance(record, InputError):
        return Problem("line", str(record))
    if not isinstance(record, dict):
        found = record if isinstance(record, Exception) else f"a {type(record).__name__}"
        text = f"must be a JSON object, not {found}: write one object on each line"
        return Problem(f"object {type(record).__name__}", text)
    return None


def _given(record: Mapping[str, Any], columns: Columns) -> tuple[Any, list[Problem]]:
    """The prompt in a column: text, or a list of messages, which may be JSON text."""
    key = columns.prompt_of(record)
    prompt = _from_json(record.get(key), list, _is_chat)
    if not (_is_text(prompt) or _is_chat(prompt)):
        rule = (
            "must be non-empty text or a list of messages, each with text as role and content: correct the row or set "
            "data.prompt_key to the column that holds the prompt, or data.prompt_template"
        )
        return prompt, [_problem(key, prompt, rule, "prompt")]
    if isinstance(prompt, str):
        rule = (
            "must be a list of messages, each with text as role and content, or its JSON text, not text that only "
            "looks like one: write the list itself, or json.dumps of it"
        )
        return prompt, [_problem(key, prompt, rule)] if _PRINTED.fullmatch(prompt) else []
    if key != columns.prompt_key and prompt[-1]["role"] == "assistant":
        rule = (
            "must not end with a message of the assistant, with which every response would begin: leave it out, or "
            "set data.prompt_key=messages if that is meant"
        )
        return prompt, [_problem(key, prompt, rule)]
    return prompt, []


def _templated(record: Mapping[str, Any], columns: Columns) -> tuple[Any, list[Problem]]:
    """The message that data.prompt_template makes of a record: texts as they are, numbers in their shortest form."""
    texts, problems = [], []
    for text, column in template_parts(columns.prompt_template):
        value = "" if column is None else value_at(record, column)
        if isinstance(value, str) or _is_finite_number(value):
            texts += [text, value if isinstance(value, str) else _shortest_text(value)]
        else:
            rule = f"must be text or a number: correct the row, or name another column, or a part of it as {column}.0"
            problems.append(_problem(str(column), None if value is MISSING else value, rule, "prompt"))
    return [{"role": "user", "content": "".join(texts)}], problems


def without_nulls(record: Mapping[str, Any], columns: Columns) -> dict[str, Any]:
    """A row of a Parquet file without the nulls in what its chat template reads.

    A column of objects gives each of them, at every level, the union of all keys.
    """
    read = (columns.prompt_of(record), *TEMPLATE_COLUMNS)
    return {key: _without_nulls(value) if key in read else value for key, value in record.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nulls(part) for part in value]
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return value


def _from_json(value: Any, kind: type, is_valid: Callable[[Any], bool]) -> Any:
    """What a text is the JSON of, if that is a valid `kind`; any other value unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] == ("[" if kind is list else "{"):
        try:
            found = json.loads(value)
        except (ValueError, RecursionError):
            return value
        if isinstance(found, kind) and is_valid(found) and _unfit(found) is None:
            return found
    return value


def _template_kwargs(record: Mapping[str, Any], prompt: Any) -> tuple[dict[str, Any], list[Problem]]:
    """The variables that a row gives the chat template, and what is wrong with them."""
    tools = _from_json(record.get("tools") or None, list, lambda found: all(isinstance(tool, dict) for tool in found))
    given = _from_json(record.get("chat_template_kwargs") or None, dict, lambda found: True)
    problems = []
    if not isinstance(tools, list | None):
        problems.append(_problem("tools", tools, "must be a list of objects, their JSON text or null: correct it"))
    if not isinstance(given, dict | None) or {"messages", "add_generation_prompt"} & {*(given or ())}:
        rule = "must be an object without messages and add_generation_prompt, its JSON text or null: correct it"
        problems.append(_problem("chat_template_kwargs", given, rule))
    if isinstance(prompt, str) and (tools or given) and not problems:
        rule = "needs a prompt of messages, since text goes through no chat template: write messages or leave it out"
        problems.append(_problem("tools" if tools else "chat_template_kwargs", tools or given, rule))
    return {} if problems else {**(given or {}), **({"tools": tools} if tools else {})}, problems


def _ground_truth(value: Any) -> tuple[Any, bool]:
    """The ground truth as text or plain JSON, and whether it is valid."""
    if isinstance(value, str):
        return value, value != ""
    if isinstance(value, int | float | decimal.Decimal) and _is_finite_number(value):
        return _shortest_text(value), True
    if not isinstance(value, bool | list | dict | None):
        return value, False
    try:
        return json.loads(json.dumps(value, default=plain)), True
    except TypeError:
        return value, False


def _problem(field: str, value: Any, rule: str, part: str = "") -> Problem:
    """A field that breaks a rule. `part`: what the record lacks if the field is missing."""
    found = "is missing" if value is None else f"is {str(value)[:60]!r} ({type(value).__name__})"
    return Problem(f"{field} {type(value).__name__}", f"{field} {found}, {rule}", part if value is None else "")


def _shortest_text(number: float | decimal.Decimal) -> str:
    """The number in digits, without a needless point or zeros: what a verifier compares as text."""
    text = f"{number if isinstance(number, decimal.Decimal) else decimal.Decimal(repr(number)):f}"
    if "." in text:
        text = text.rstrip("0").removesuffix(".")
    return "0" if text == "-0" else text


def _unfit(value: Any, nesting: int = 1) -> str | None:
    """Why `value` is not valid text or plain data; None if it is."""
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
    return isinstance(value, float | decimal.Decimal) and math.isfinite(value)


def plain(value: Any) -> Any:
    """The JSON value for one that JSON has no type for. TypeError if none exists."""
    if isinstance(value, decimal.Decimal | uuid.UUID | datetime.timedelta):
        return str(value)
    if isinstance(value, datetime.date | datetime.time):  # a datetime is a date
        return value.isoformat()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if hasattr(value, "tolist"):  # a NumPy array or scalar: of 32 or 16 bits, as it was written, 0.1
        narrow = str(getattr(value, "dtype", "")) in ("float16", "float32")
        return (value.__array__().astype(str).astype(float) if narrow else value).tolist()
    raise TypeError(f"a {type(value).__name__} has no form in JSON")
