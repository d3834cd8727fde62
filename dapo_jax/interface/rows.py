"""Host: rows of a program as the prompt files of a run."""

import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dapo_jax.config.places import copy_of, is_address
from dapo_jax.config.sections import Config
from dapo_jax.config.values import with_values
from dapo_jax.data.prompt_files import arrow_records
from dapo_jax.data.row_schema import plain
from dapo_jax.errors import InputError
from dapo_jax.monitor.recipe import read_config

Rows = Any  # dicts, a DataFrame of pandas or polars, a datasets.Dataset, a pyarrow.Table; or the path of a file


def with_rows(config: Config, data: Rows | None, eval_data: Rows | None) -> Config:
    """`config` with these rows to train on and to evaluate on; None leaves the config's. See `dapo_jax.train`."""
    values: dict[str, Any] = {"data.task": "files"}
    if data is not None:
        values |= {"data.train_files": (rows_file(config.workdir, "data", data),), "data.mixture": ()}
    elif config.data.task != "files":
        raise InputError(f"eval_data goes with prompt files, not with data.task={config.data.task}: give data as well")
    if eval_data is not None:
        values["data.val_files"] = (rows_file(config.workdir, "eval_data", eval_data),)
    return with_values(config, values)


def rows_file(workdir: str, name: str, rows: Rows) -> str:
    """The prompt file with the rows, written to the work directory unless they are a path already.

    Args:
        name: of the argument with the rows, and of the file.

    Raises:
        InputError: they are no rows, or not those with which the run in `workdir` began.
    """
    if isinstance(rows, str | os.PathLike):
        return os.fspath(rows)
    text = "".join(_line(name, number, row) for number, row in enumerate(_dicts(name, rows), start=1))
    if not text:
        raise InputError(f"{name} must have a row: give some")
    folder = copy_of(workdir, "rows") if is_address(workdir) else Path(workdir) / "rows"
    file = folder / f"{name}.jsonl"
    before = file.read_text(encoding="utf-8") if file.exists() else None
    if before not in (None, text) and read_config(workdir):
        raise InputError(
            f"{name} must be the rows of {file}, with which the run in workdir={workdir} began: give the same, or "
            "choose a new workdir"
        )
    if before != text:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=folder, delete=False) as partial:
            partial.write(text)
        Path(partial.name).replace(file)
    return str(file)


def _dicts(name: str, rows: Any) -> Iterable[Any]:
    """The rows of a table, each as a dict, by whatever method its library has for that."""
    if hasattr(rows, "to_batches"):  # pyarrow
        return arrow_records(rows)
    for method in ("to_pylist", "to_dicts"):  # others of pyarrow, polars
        if hasattr(rows, method):
            return getattr(rows, method)()
    if hasattr(rows, "iterrows"):  # pandas, where NaN stands for what is missing
        return rows.astype(object).where(rows.notna(), None).to_dict("records")
    if isinstance(rows, Mapping) or not isinstance(rows, Iterable):
        given = f"a {type(rows).__name__}" + (f" of {', '.join(map(str, rows))}" if isinstance(rows, Mapping) else "")
        raise InputError(f"{name} must be dicts, a DataFrame, a Dataset or a path, not {given}: give one of these")
    return rows


def _line(name: str, number: int, row: Any) -> str:
    if not isinstance(row, Mapping):
        raise InputError(f"{name}, row {number} must be a dict of columns, not a {type(row).__name__}: give the rows")
    try:
        return json.dumps(dict(row), default=plain, sort_keys=True) + "\n"
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{name}, row {number} must be a dict that JSON can hold: {error}: convert its values"
        ) from error
