"""Host: how the tokens of an update were divided among experts."""

import functools
from collections.abc import Sequence

import jax
import numpy as np

from dapo_jax.models.experts import RoutingCounts, load_balancing_loss, relative_loads, replaced_share


def router_metrics(steps: Sequence[RoutingCounts], experts_per_token: int, *, replayed: bool) -> dict[str, float]:
    """The metrics of some optimizer steps, from sums over the real tokens of their bins.

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
