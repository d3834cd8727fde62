"""Device: the policy's loss and update. Splitting a mini-batch changes nothing: every piece adds up a sum."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh

from dapo_jax.algorithms import aggregation, policy_loss
from dapo_jax.containers import Batch, Mean
from dapo_jax.learner.optimizer import OptimizerSettings, TrainState, apply_gradients, init_state
from dapo_jax.learner.token_logprobs import response_logprobs
from dapo_jax.models.architecture import Architecture
from dapo_jax.models.weights import cast_matrices, init_params, unflatten, weight_table
from dapo_jax.parallel.sharding import DECODE_RULES, TRAIN_RULES, batch_sharding, replicated, weight_sharding

Metrics = dict[str, Mean]


@dataclass(frozen=True)
class ActorSettings:
    """What the compiled functions depend on."""

    arch: Architecture
    dtype: Any  # of the operands of matrix products
    temperature: float  # of the sampling policy
    remat: bool
    chunk_size: int  # tokens whose logits exist at a time
    clip_ratio_low: float
    clip_ratio_high: float
    clip_ratio_c: float
    loss_agg_mode: str
    loss_scale_factor: float
    optimizer: OptimizerSettings


@struct.dataclass
class Denominators:
    """Counts over a whole mini-batch, made before it is split."""

    num_tokens: Any
    num_sequences: Any


@dataclass(frozen=True)
class Actor:
    """The compiled functions of a policy on a mesh."""

    init_random: Callable[[int], TrainState]  # seed -> state
    init_from: Callable[[Any], TrainState]  # params (donated) -> state
    place: Callable[[Any, Any], jax.Array]  # (weight, host array) -> sharded parameter
    decode_weights: Callable[[Any], Any]  # params -> weights for rollout/, cast and re-laid
    logprobs: Callable[[Any, Batch], jax.Array]  # (params, micro-batch) -> [B, R], whole on every device
    zero_gradients: Callable[[Any], Any]  # params -> gradients
    accumulate: Callable[[Any, Any, Batch, Denominators], tuple[Any, Metrics]]  # gradients are donated
    apply: Callable[[TrainState, Any, Any], tuple[TrainState, jax.Array]]  # the state is donated
    state_shape: Any  # TrainState of jax.ShapeDtypeStruct with shardings, for restoring


def loss_fn(
    params: Any, batch: Batch, denominators: Denominators, settings: ActorSettings
) -> tuple[jax.Array, Metrics]:
    """This micro-batch's share of the mini-batch's loss, and mergeable metrics."""
    logprobs, entropy = response_logprobs(
        cast_matrices(params, settings.arch, settings.dtype),
        batch,
        arch=settings.arch,
        temperature=settings.temperature,
        remat=settings.remat,
        chunk_size=settings.chunk_size,
    )
    token_loss, metrics = policy_loss.vanilla(
        logprobs,
        batch.old_logprobs,
        batch.advantages,
        batch.mask,
        clip_ratio_low=settings.clip_ratio_low,
        clip_ratio_high=settings.clip_ratio_high,
        clip_ratio_c=settings.clip_ratio_c,
    )
    weights = aggregation.token_weights(
        batch.mask,
        settings.loss_agg_mode,
        num_tokens=denominators.num_tokens,
        num_sequences=denominators.num_sequences,
        scale_factor=settings.loss_scale_factor,
    )
    loss = aggregation.weighted_sum(token_loss, weights, batch.mask)
    difference = jax.lax.stop_gradient(logprobs) - batch.old_logprobs
    metrics = {
        **metrics,
        "pg_loss": Mean(jax.lax.stop_gradient(loss), jnp.float32(0)),  # a sum: its shares add up
        "entropy": Mean.of(entropy, batch.mask),
        "logprob_abs_diff": Mean.of(jnp.abs(difference), batch.mask),
        "logprob_k3": Mean.of(jnp.exp(difference) - 1 - difference, batch.mask),
    }
    return loss, metrics


def build_actor(settings: ActorSettings, mesh: Mesh) -> Actor:
    """Compiles (on first use) the functions of a policy sharded over `mesh`."""
    arch = settings.arch
    table = weight_table(arch)
    shardings = unflatten((weight, weight_sharding(weight, mesh, TRAIN_RULES)) for weight in table)
    whole, rows = replicated(mesh), batch_sharding(mesh)
    abstract_params = unflatten((weight, jax.ShapeDtypeStruct(weight.shape, jnp.float32)) for weight in table)
    abstract_state = jax.eval_shape(lambda params: init_state(params, settings.optimizer), abstract_params)
    state_shardings = TrainState(
        params=shardings,
        moments=optax.tree_map_params(
            lambda params: init_state(params, settings.optimizer).moments,
            lambda _, sharding: sharding,
            abstract_state.moments,
            shardings,
            transform_non_params=lambda _: whole,
        ),
        updates=whole,
        skipped=whole,
    )

    def accumulate(params, gradients, batch, denominators):
        compute = jax.value_and_grad(loss_fn, has_aux=True)
        (_, metrics), new = compute(params, batch, denominators, settings)
        return jax.tree.map(jnp.add, gradients, new), metrics

    def logprobs(params, batch):
        values, _ = response_logprobs(
            cast_matrices(params, arch, settings.dtype),
            batch,
            arch=arch,
            temperature=settings.temperature,
            remat=False,
            chunk_size=settings.chunk_size,
        )
        return values

    decode_shardings = unflatten((weight, weight_sharding(weight, mesh, DECODE_RULES)) for weight in table)
    return Actor(
        init_random=jax.jit(
            lambda seed: init_state(init_params(arch, seed), settings.optimizer), out_shardings=state_shardings
        ),
        init_from=jax.jit(
            lambda params: init_state(params, settings.optimizer),
            out_shardings=state_shardings,
            donate_argnums=0,
        ),
        place=lambda weight, array: jax.make_array_from_callback(
            array.shape, weight_sharding(weight, mesh, TRAIN_RULES), lambda index: array[index]
        ),
        decode_weights=jax.jit(
            lambda params: unstack_layers(cast_matrices(params, arch, settings.dtype)),
            out_shardings=_unstacked_shardings(decode_shardings, arch),
        ),
        logprobs=jax.jit(logprobs, in_shardings=(shardings, rows), out_shardings=whole),
        zero_gradients=jax.jit(lambda params: jax.tree.map(jnp.zeros_like, params), out_shardings=shardings),
        accumulate=jax.jit(
            accumulate,
            in_shardings=(shardings, shardings, rows, whole),
            out_shardings=(shardings, whole),
            donate_argnums=1,
        ),
        apply=jax.jit(
            lambda state, gradients, rate: apply_gradients(state, gradients, rate, settings.optimizer),
            in_shardings=(state_shardings, shardings, whole),
            out_shardings=(state_shardings, whole),
            donate_argnums=0,
        ),
        state_shape=jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            abstract_state,
            state_shardings,
        ),
    )


def unstack_layers(params: dict[str, Any]) -> dict[str, Any]:
    """`params` with "layers" as a list of one pytree a layer, as decoding wants them."""
    num_layers = jax.tree.leaves(params["layers"])[0].shape[0]
    layers = [jax.tree.map(lambda x, i=i: x[i], params["layers"]) for i in range(num_layers)]
    return {**params, "layers": layers}


def _unstacked_shardings(shardings: dict[str, Any], arch: Architecture) -> dict[str, Any]:
    """Shardings of `unstack_layers`' result: each layer's without the first dimension."""
    layer = jax.tree.map(
        lambda sharding: type(sharding)(sharding.mesh, type(sharding.spec)(*sharding.spec[1:])), shardings["layers"]
    )
    return {**shardings, "layers": [layer] * arch.num_layers}
