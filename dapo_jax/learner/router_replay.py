"""Host: the experts that tokens went to when they were sampled, in the rows that the learner is given."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from dapo_jax.data.containers import Batch
from dapo_jax.data.experience import joined_records


def expert_records(records: Sequence[np.ndarray] | None, count: int) -> np.ndarray | None:
    """[count] objects: the records of experts, and empty ones where there are no more; None without any."""
    if not records:
        return None
    found = np.empty(count, object)
    for index in range(count):
        found[index] = records[index] if index < len(records) else records[0][:0]
    return found


def saved_fields(batch: Batch) -> dict[str, np.ndarray]:
    """The arrays of `batch` by name; the records of experts follow each other, with the tokens of each."""
    arrays = {name: np.asarray(value) for name, value in vars(batch).items() if value is not None}
    for name in ("experts", "prompt_experts"):
        if name in arrays:
            records = arrays[name].tolist()
            arrays |= {name: joined_records(records), f"{name}_tokens": np.array([len(record) for record in records])}
    return arrays


def choosing_experts(batch: Batch) -> Batch:
    """`batch` whose tokens choose their experts themselves, wherever they went when they were sampled."""
    return dataclasses.replace(batch, experts=None, prompt_experts=None)
