"""Device: the policy's loss and its compiled functions. Splitting a mini-batch changes nothing: each piece is a sum."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dapo_jax.algorithms.aggregation import weighted_sum
from dapo_jax.algorithms.arguments import chosen, needs
from dapo_jax.algorithms.kl import kl_penalty
from dapo_jax.algorithms.policy_loss import LOSSES, SELECTIONS
from dapo_jax.containers import Batch, Mean
from dapo_jax.learner.optimizer import OptimizerSettings
from dapo_jax.learner.token_logprobs import response_logprobs
from dapo_jax.learner.trainable import Metrics, Trainable, build_trainable
from dapo_jax.models.architecture import Architecture
from dapo_jax.models.transformer import AttentionKernel
from dapo_jax.models.weights import cast_matrices, unflatten, weight_table
from dapo_jax.parallel.sharding import DECODE_RULES, batch_sharding, replicated, weight_sharding


@dataclass(frozen=True)
class ActorSettings:
    """What the compiled functions depend on."""

    arch: Architecture
    dtype: Any  # of the operands of matrix products
    temperature: float  # of the sampling policy
    remat: str  # a name of models/remat.py's POLICIES
    attention_kernel: AttentionKernel | None  # None: XLA's attention
    chunk_size: int  # tokens whose logits exist at a time
    loss_mode: str  # a name of LOSSES
    loss_options: Mapping[str, float]  # options of the losses by name
    entropy_coeff: float
    kl_loss_coef: float  # 0: no KL divergence in the loss
    kl_loss_type: str
    optimizer: OptimizerSettings


@dataclass(frozen=True)
class Actor:
    """The compiled functions of a policy on a mesh."""

    trainable: Trainable
    decode_weights: Callable[[Any], Any]  # params -> weights for rollout/, cast and re-laid
    freeze: Callable[[Any], Any]  # params (donated) -> weights in the dtype of matrix products, for `logprobs`
    logprobs: Callable[[Any, Batch], tuple[jax.Array, jax.Array]]  # -> log-probabilities, entropy [B, R], replicated
    select: Callable[[Batch, jax.Array], jax.Array] | None  # (mini-batch, logprobs) -> `selected` for its loss


def loss_fn(params: Any, batch: Batch, settings: ActorSettings) -> tuple[jax.Array, Metrics]:
    """This micro-batch's share of the mini-batch's loss, and mergeable metrics.

    A metric whose count is 0 is a sum: its shares add up over the mini-batch.
    """
    logprobs, entropy = response_logprobs(
        cast_matrices(params, settings.arch, settings.dtype),
        batch,
        arch=settings.arch,
        temperature=settings.temperature,
        remat=settings.remat,
        attention_kernel=settings.attention_kernel,
        chunk_size=settings.chunk_size,
        entropy_gradient=settings.entropy_coeff != 0,
    )
    token_loss, metrics = policy_token_loss(logprobs, batch, settings)
    total = weighted_sum(token_loss, batch.loss_weights, batch.loss_mask)
    metrics["pg_loss"] = Mean(total, jnp.float32(0))
    if settings.kl_loss_coef:
        kl = kl_penalty(logprobs, batch.ref_logprobs, settings.kl_loss_type)
        metrics["kl_loss"] = Mean.of(kl, batch.loss_mask)
        total += settings.kl_loss_coef * weighted_sum(kl, batch.loss_weights, batch.loss_mask)
    if settings.entropy_coeff:
        total -= settings.entropy_coeff * weighted_sum(entropy, batch.loss_weights, batch.loss_mask)
    difference = logprobs - batch.old_logprobs
    metrics |= {
        "loss": Mean(total, jnp.float32(0)),
        "entropy": Mean.of(entropy, batch.loss_mask),
        "logprob_abs_diff": Mean.of(jnp.abs(difference), batch.mask),
        "logprob_k3": Mean.of(jnp.exp(difference) - 1 - difference, batch.mask),
    }
    return total, jax.lax.stop_gradient(metrics)


def policy_token_loss(logprobs: jax.Array, batch: Batch, settings: ActorSettings) -> tuple[jax.Array, Metrics]:
    """The policy loss [B, R] of each token, times its importance weight if there are any, and the loss's metrics."""
    function, weights = LOSSES[settings.loss_mode], batch.importance_weights
    weighs_itself = needs(function, "importance_weights")
    available = {
        **settings.loss_options,
        "selected": batch.selected,
        "importance_weights": jnp.ones_like(logprobs) if weights is None else weights,
    }
    token_loss, metrics = function(
        logprobs, batch.old_logprobs, batch.advantages, batch.loss_mask, **chosen(function, available)
    )
    if weights is not None and not weighs_itself:
        token_loss = token_loss * weights
    return token_loss, dict(metrics)


def build_actor(settings: ActorSettings, mesh: Mesh) -> Actor:
    """Compiles (on first use) the functions of a policy sharded over `mesh`."""
    arch = settings.arch
    trainable = build_trainable(
        lambda params, batch: loss_fn(params, batch, settings), arch, settings.optimizer, mesh
    )
    whole, rows = replicated(mesh), batch_sharding(mesh)

    def logprobs(params, batch):
        return response_logprobs(
            cast_matrices(params, arch, settings.dtype),
            batch,
            arch=arch,
            temperature=settings.temperature,
            remat="none",
            attention_kernel=settings.attention_kernel,
            chunk_size=settings.chunk_size,
            entropy_gradient=False,
        )

    def select(batch, logprobs):
        function = SELECTIONS[settings.loss_mode]
        arrays = logprobs, batch.old_logprobs, batch.advantages, batch.loss_mask, batch.noise
        return function(*arrays, **chosen(function, settings.loss_options))

    decode_shardings = unflatten(
        (weight, weight_sharding(weight, mesh, DECODE_RULES)) for weight in weight_table(arch)
    )
    return Actor(
        trainable=trainable,
        decode_weights=jax.jit(
            lambda params: unstack_layers(cast_matrices(params, arch, settings.dtype)),
            out_shardings=_unstacked_shardings(decode_shardings, arch),
        ),
        freeze=jax.jit(
            lambda params: cast_matrices(params, arch, settings.dtype),
            out_shardings=trainable.shardings,
            donate_argnums=0,
        ),
        logprobs=jax.jit(logprobs, in_shardings=(trainable.shardings, rows), out_shardings=whole),
        select=jax.jit(select, out_shardings=whole) if settings.loss_mode in SELECTIONS else None,
    )


class LatestWeights:
    """The decoding weights of the newest parameters, made once per update."""

    def __init__(self, decode_weights: Callable[[Any], Any]) -> None:
        self._make = decode_weights
        self._params: Any = None
        self._weights: Any = None

    def __call__(self, params: Any) -> Any:
        """The decoding weights of `params`."""
        if self._params is not params:
            self.drop()
            self._params, self._weights = params, self._make(params)
        return self._weights

    def drop(self) -> None:
        """Frees them, before an update needs the memory."""
        self._params = self._weights = None


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
