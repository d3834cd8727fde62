"""Device: the reward model: a transformer with a scalar head that scores whole conversations."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from dapo_jax.models import transformer
from dapo_jax.models.architecture import Architecture
from dapo_jax.models.weights import build_freeze, weight_shardings, weight_table
from dapo_jax.parallel.sharding import TRAIN_RULES, batch_sharding, replicated


@dataclass(frozen=True)
class RewardModel:
    """The compiled functions of a reward model on a mesh."""

    freeze: Callable[[Any], Any]  # params (donated) -> weights in the dtype of matrix products
    scores: Callable[[Any, jax.Array, jax.Array], jax.Array]  # (weights, tokens, mask [B, T]) -> [B], replicated


def build_reward_model(arch: Architecture, dtype: Any, mesh: Mesh) -> RewardModel:
    """The functions of a reward model sharded over `mesh`, compiled on first use."""
    shardings = weight_shardings(weight_table(arch), mesh, TRAIN_RULES)
    rows = batch_sharding(mesh)
    return RewardModel(
        freeze=build_freeze(arch, dtype, mesh),
        scores=jax.jit(
            lambda params, tokens, mask: conversation_scores(params, tokens, mask, arch),
            in_shardings=(shardings, rows, rows),
            out_shardings=replicated(mesh),
        ),
    )


def conversation_scores(params: Any, tokens: jax.Array, mask: jax.Array, arch: Architecture) -> jax.Array:
    """The scalar head's value [B] at the last token of each conversation.

    Args:
        tokens, mask: [B, T], left-padded.
    """
    hidden = transformer.forward(params, tokens, transformer.positions_of(mask), mask, arch)
    return transformer.scalar(params, hidden[:, -1])
