"""Host: the experts that tokens went to: when they were sampled, in the rows of the learner, and in an update."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import numpy as np

from dapo_jax.data.containers import Batch
from dapo_jax.data.experience import joined_records
from dapo_jax.models.experts import RoutingCounts, load_balancing_loss, relative_loads, replaced_share


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


def router_metrics(steps: Sequence[RoutingCounts], experts_per_token: int, *, replayed: bool) -> dict[str, float]:
    """The metrics of some optimizer steps, from sums over their responses' tokens, but the last.

    The auxiliary loss is that of transformers, over all layers together: E times the sum over experts of the choices
    of the expert per token, times the mean of its probability. k experts of a token with equal loads give k. Nothing
    is trained on it.

    Args:
        steps: NumPy arrays, stacked over the layers with experts.
        experts_per_token: k.
        replayed: tokens went to the experts that the sampler used.
    """
    layers = jax.tree.map(lambda *parts: np.sum(parts, axis=0, dtype=np.float64), *steps)
    whole = jax.tree.map(functools.partial(np.sum, axis=0), layers)
    loads = relative_loads(layers)
    metrics = {
        "router/aux_loss": float(load_balancing_loss(whole, experts_per_token)),
        "router/max_load": float(loads.max()),
        "router/min_load": float(loads.min()),
    }
    return metrics | ({"router/replay_differs": float(replaced_share(whole))} if replayed else {})
