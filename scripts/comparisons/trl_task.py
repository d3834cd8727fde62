"""The task for train_with_trl.py: problems, verdicts, lengths. It imports neither jax nor torch."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow.parquet

from dapo_jax.rewards.numerals import arithmetic


def rows_of(files: Sequence[str]) -> list[dict[str, Any]]:
    """Chats and answers of prompt files; an empty system message keeps the template from adding its own."""
    rows = itertools.chain.from_iterable(pyarrow.parquet.read_table(file).to_pylist() for file in files)
    system = {"role": "system", "content": ""}
    return [{"prompt": [system, *row["prompt"]], "ground_truth": row["reward_model"]["ground_truth"]} for row in rows]


def is_right(completion: str, ground_truth: str) -> float:
    """The reward of data source "arithmetic", by the same function."""
    return arithmetic("arithmetic", completion, ground_truth, {})["score"]


def length_of(tokens: Sequence[int], eos: int, most: int) -> int:
    """Tokens of a completion with its end token; `most` if it has none."""
    return tokens.index(eos) + 1 if eos in tokens else most


def batches(rows: list[dict[str, Any]], size: int) -> Iterator[list[dict[str, Any]]]:
    """`size` rows at a time."""
    return (rows[start : start + size] for start in range(0, len(rows), size))
