"""Device: a value function: the policy's transformer with a scalar head, its loss and its compiled functions."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dapo_jax.algorithms.aggregation import weighted_sum
from dapo_jax.algorithms.value_loss import clipped_value_loss
from dapo_jax.data.containers import Mean, MicroBatch
from dapo_jax.learner.optimizer import OptimizerSettings, TrainState
from dapo_jax.learner.token_logprobs import response_hidden
from dapo_jax.learner.trainable import Metrics, Trainable, build_trainable
from dapo_jax.models import transformer
from dapo_jax.models.architecture import Architecture
from dapo_jax.models.attention import BinAttention
from dapo_jax.models.weights import cast_matrices, init_params, weight_table
from dapo_jax.parallel.sharding import batch_sharding, replicated


@dataclass(frozen=True)
class CriticSettings:
    """What the compiled functions depend on."""

    arch: Architecture  # with a scalar head
    dtype: Any  # of the operands of matrix products
    remat: str  # a name of models/remat.py's POLICIES
    attention: BinAttention
    cliprange_value: float
    optimizer: OptimizerSettings
    compiler_options: Mapping[str, Any] = field(default_factory=dict)  # XLA's, of passes over the layers


@dataclass(frozen=True)
class Critic:
    """The compiled functions of a value function on a mesh."""

    trainable: Trainable
    init_from_policy: Callable[[Any], TrainState]  # a policy's params (not donated) -> state with a zero head
    values: Any  # jitted: (params, micro-batch) -> [S, U], replicated


def critic_architecture(policy: Architecture) -> Architecture:
    """The policy's transformer with a scalar head."""
    return dataclasses.replace(policy, scalar_head=True)


def response_values(params: Any, batch: MicroBatch, settings: CriticSettings) -> jax.Array:
    """Value [S, U] of the state in which each response token was drawn; float32."""
    params = cast_matrices(params, settings.arch, settings.dtype, tables=False)
    hidden, _ = response_hidden(params, batch, arch=settings.arch, remat=settings.remat, attention=settings.attention)
    return transformer.scalar(params, hidden)


def loss_fn(params: Any, batch: MicroBatch, settings: CriticSettings) -> tuple[jax.Array, Metrics]:
    """This micro-batch's share of the mini-batch's loss, and mergeable metrics."""
    values = response_values(params, batch, settings)
    token_loss, metrics = clipped_value_loss(
        values, batch.values, batch.returns, batch.loss_mask, cliprange_value=settings.cliprange_value
    )
    total = weighted_sum(token_loss, batch.loss_weights, batch.loss_mask)
    return total, {**metrics, "vf_loss": Mean(jax.lax.stop_gradient(total), jnp.float32(0))}


def build_critic(settings: CriticSettings, mesh: Mesh) -> Critic:
    """Compiles (on first use) the functions of a value function sharded over `mesh`."""
    trainable = build_trainable(
        lambda params, _, batch: loss_fn(params, batch, settings),
        weight_table(settings.arch),
        lambda seed: init_params(settings.arch, seed),
        settings.optimizer,
        mesh,
        compiler_options=settings.compiler_options,
    )

    def with_zero_head(params):
        trunk = {name: value for name, value in params.items() if name != "head"}
        return {**trunk, "score": jnp.zeros(settings.arch.hidden_size)}

    with_zero_head = jax.jit(with_zero_head, out_shardings=trainable.shardings)
    return Critic(
        trainable=trainable,
        init_from_policy=lambda params: trainable.init_from(with_zero_head(params)),
        values=jax.jit(
            lambda params, batch: response_values(params, batch, settings),
            in_shardings=(trainable.shardings, batch_sharding(mesh)),
            out_shardings=replicated(mesh),
            compiler_options=dict(settings.compiler_options),
        ),
    )
