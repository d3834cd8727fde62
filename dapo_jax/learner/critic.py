"""Device: a value function: the policy's transformer with a scalar head, its loss and its compiled functions."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dapo_jax.algorithms.aggregation import weighted_sum
from dapo_jax.algorithms.value_loss import clipped_value_loss
from dapo_jax.config.sections import CriticConfig
from dapo_jax.data.containers import Mean, MicroBatch
from dapo_jax.learner.optimizer import TrainState
from dapo_jax.learner.token_logprobs import response_hidden
from dapo_jax.learner.trainable import Metrics, Passes, Trainable, build_trainable
from dapo_jax.models import transformer
from dapo_jax.models.weights import cast_matrices, init_params, weight_table
from dapo_jax.parallel.sharding import batch_sharding, replicated


@dataclass(frozen=True)
class Critic:
    """The compiled functions of a value function on a mesh."""

    trainable: Trainable
    init_from_policy: Callable[[Any], TrainState]  # a policy's params (not donated) -> state with a zero head
    values: Any  # jitted: (params, micro-batch) -> [S, U], replicated


def response_values(params: Any, batch: MicroBatch, passes: Passes) -> jax.Array:
    """Value [S, U] of the state in which each response token was drawn; float32."""
    params = cast_matrices(params, passes.arch, passes.dtype, tables=False)
    hidden, _ = response_hidden(params, batch, passes, remat=passes.remat)
    return transformer.scalar(params, hidden).reshape(batch.sources.shape)


def loss_fn(params: Any, batch: MicroBatch, passes: Passes, options: CriticConfig) -> tuple[jax.Array, Metrics]:
    """This micro-batch's share of the mini-batch's loss, and mergeable metrics."""
    values = response_values(params, batch, passes)
    token_loss, metrics = clipped_value_loss(
        values, batch.values, batch.returns, batch.loss_mask, cliprange_value=options.cliprange_value
    )
    total = weighted_sum(token_loss, batch.loss_weights, batch.loss_mask)
    return total, {**metrics, "vf_loss": Mean(jax.lax.stop_gradient(total), jnp.float32(0))}


def build_critic(of_policy: Passes, options: CriticConfig, mesh: Mesh) -> Critic:
    """Compiles (on first use) the functions of a value function sharded over `mesh`: its passes are the policy's."""
    arch = dataclasses.replace(of_policy.arch, scalar_head=True)
    passes = dataclasses.replace(of_policy, arch=arch)
    trainable = build_trainable(
        lambda params, _, batch: loss_fn(params, batch, passes, options),
        weight_table(arch),
        lambda seed: init_params(arch, seed),
        options,
        mesh,
        compiler_options=passes.compiler_options,
        dtype=passes.dtype,
    )

    def with_zero_head(params):
        trunk = {name: value for name, value in params.items() if name != "head"}
        return {**trunk, "score": jnp.zeros(arch.hidden_size)}

    with_zero_head = jax.jit(with_zero_head, out_shardings=trainable.shardings)
    return Critic(
        trainable=trainable,
        init_from_policy=lambda params: trainable.init_from(with_zero_head(params)),
        values=jax.jit(
            lambda params, batch: response_values(params, batch, passes),
            in_shardings=(trainable.shardings, batch_sharding(mesh)),
            out_shardings=replicated(mesh),
            compiler_options=dict(passes.compiler_options),
        ),
    )
