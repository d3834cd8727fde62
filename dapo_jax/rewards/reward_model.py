"""Device: the reward model: a transformer with a scalar head that scores whole conversations."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from dapo_jax.models import transformer
from dapo_jax.models.architecture import Architecture
from dapo_jax.models.weights import weight_shardings, weight_table
from dapo_jax.parallel.sharding import TRAIN_RULES, batch_sharding, replicated


def build_scores(arch: Architecture, mesh: Mesh) -> Callable[[Any, jax.Array, jax.Array], jax.Array]:
    """(weights, tokens, mask [B, T]) -> `conversation_scores`, replicated, of a model sharded over `mesh`.

    Compiled on first use.
    """
    rows = batch_sharding(mesh)
    return jax.jit(
        lambda params, tokens, mask: conversation_scores(params, tokens, mask, arch),
        in_shardings=(weight_shardings(weight_table(arch), mesh, TRAIN_RULES), rows, rows),
        out_shardings=replicated(mesh),
    )


def conversation_scores(params: Any, tokens: jax.Array, mask: jax.Array, arch: Architecture) -> jax.Array:
    """The scalar head's value [B] at the last token of each conversation.

    Args:
        tokens, mask: [B, T], left-padded.
    """
    hidden = transformer.forward(params, tokens, transformer.positions_of(mask), mask, arch)
    return transformer.scalar(params, hidden[:, -1])
