"""Device: the policy's loss and its compiled functions. Splitting a mini-batch changes nothing: each piece is a sum."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dapo_jax.algorithms.aggregation import weighted_sum
from dapo_jax.algorithms.arguments import chosen, needs
from dapo_jax.algorithms.distillation import coarse_reverse_kl
from dapo_jax.algorithms.kl import kl_penalty
from dapo_jax.algorithms.named import named_loss
from dapo_jax.algorithms.ratios import off_policy_sequences
from dapo_jax.algorithms.rollout_correction import OUTLIER
from dapo_jax.algorithms.token_selection import SELECTIONS
from dapo_jax.config.derived import candidates
from dapo_jax.config.sections import ActorConfig, DistillationConfig
from dapo_jax.data.containers import Batch, Max, Mean, MicroBatch, Tokens
from dapo_jax.learner.decode_weights import build_decode_weights
from dapo_jax.learner.token_logprobs import TokenStatistics, most_likely_tokens, response_statistics
from dapo_jax.learner.trainable import Metrics, Passes, Trainable, WithFrozen, build_trainable
from dapo_jax.models.experts import RoutingCounts
from dapo_jax.models.lora import Lora, adapter_table, init_adapters, with_adapters
from dapo_jax.models.weights import cast_matrices, init_params, weight_table
from dapo_jax.parallel.sharding import replicated

ROUTING = "routing"  # the metric of what the routers did
RATIO_STEP, RATIO_BUCKETS = 0.01, 201  # ratios are counted by multiples of the step: 0, 0.01 ... 2 and above


@dataclass(frozen=True)
class ActorSettings:
    """What the compiled functions depend on."""

    passes: Passes
    options: ActorConfig
    temperature: float  # of the sampling policy
    distillation: DistillationConfig = DistillationConfig()
    lora: Lora | None = None  # None: all weights are trained


@dataclass(frozen=True)
class Actor:
    """The compiled functions of a policy on a mesh."""

    trainable: Trainable  # of all weights, or of the adapters
    decode_weights: WithFrozen  # params -> weights for rollout/, cast and resharded
    statistics: WithFrozen  # (params, micro-batch) -> TokenStatistics, replicated
    most_likely: WithFrozen  # (params, micro-batch) -> the candidates [S, U, K], replicated
    select: Callable[[Batch, jax.Array], jax.Array] | None  # (mini-batch, logprobs) -> `selected` for its loss
    experts_per_token: int = 0  # 0: no layer has experts


def loss_options(options: ActorConfig) -> dict[str, float]:
    """The options of the policy losses, by name."""
    clip = {name: getattr(options, name) for name in ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")}
    return clip | {name: value for name, value in vars(options.policy_loss).items() if name != "loss_mode"}


def operands(params: Any, frozen: Any, settings: ActorSettings) -> Any:
    """The weights of the training forward pass, in the dtype of matrix products."""
    if settings.lora is None:
        return cast_matrices(params, settings.passes.arch, settings.passes.dtype, tables=False)
    return with_adapters(frozen, params, settings.lora, settings.passes.dtype)


def token_statistics(
    params: Any, frozen: Any, batch: MicroBatch, settings: ActorSettings, *, remat: str
) -> tuple[TokenStatistics, RoutingCounts | None]:
    """`response_statistics` of trained parameters, which may be adapters."""
    return response_statistics(
        operands(params, frozen, settings),
        batch,
        settings.passes,
        temperature=settings.temperature,
        remat=remat,
        chunk_size=settings.options.logprob_chunk_size,
        entropy_gradient=settings.options.entropy_coeff != 0,
    )


def loss_fn(params: Any, frozen: Any, batch: MicroBatch, settings: ActorSettings) -> tuple[jax.Array, Metrics]:
    """This micro-batch's share of the mini-batch's loss, and mergeable metrics."""
    found, routing = token_statistics(params, frozen, batch, settings, remat=settings.passes.remat)
    total, metrics = loss_of(found, batch, settings)
    if routing is not None:
        metrics[ROUTING] = routing
    return total, jax.lax.stop_gradient(metrics)


def loss_of(found: TokenStatistics, batch: MicroBatch, settings: ActorSettings) -> tuple[jax.Array, Metrics]:
    """The loss and the metrics of a micro-batch whose tokens have these statistics.

    A metric whose count is 0 is a sum: its shares add up over the mini-batch.
    """
    logprobs, entropy, _, of_candidates = found
    options = settings.options
    token_loss, metrics = policy_token_loss(logprobs, batch, options)
    total = weighted_sum(token_loss, batch.loss_weights, batch.loss_mask)
    metrics["pg_loss"] = Mean(total, jnp.float32(0))
    if options.use_kl_loss and options.kl_loss_coef:
        kl = kl_penalty(logprobs, batch.ref_logprobs, options.kl_loss_type)
        metrics["kl_loss"] = Mean.of(kl, batch.loss_mask)
        total += options.kl_loss_coef * weighted_sum(kl, batch.loss_weights, batch.loss_mask)
    if candidates(settings.distillation):
        assert of_candidates is not None
        kl = coarse_reverse_kl(of_candidates, batch.teacher_logprobs)
        metrics["student_mass"] = Mean.of(jnp.sum(jnp.exp(of_candidates), axis=-1), batch.loss_mask)
        metrics["distillation_loss"] = Mean.of(kl, batch.loss_mask)
        total += settings.distillation.weight * weighted_sum(kl, batch.loss_weights, batch.loss_mask)
    if options.entropy_coeff:
        entropy_loss = weighted_sum(entropy, batch.loss_weights, batch.loss_mask)
        metrics["entropy_loss"] = Mean(entropy_loss, jnp.float32(0))
        total -= options.entropy_coeff * entropy_loss
    difference = logprobs - batch.old_logprobs
    ratio, mask = jnp.exp(difference), batch.policy_mask
    metrics |= {
        "loss": Mean(total, jnp.float32(0)),
        "entropy": Mean.of(entropy, batch.loss_mask),
        "logprob_abs_diff": Mean.of(jnp.abs(difference), mask),
        "logprob_abs_diff_max": Max.of(jnp.abs(difference), mask),
        "logprob_k3": Mean.of(ratio - 1 - difference, mask),
        "logprob_outliers": Mean.of(jnp.abs(difference) > OUTLIER, mask),
        "ratio": Mean.of(ratio, mask),
        "squared_ratio": Mean.of(jnp.square(ratio), mask),
        "ratio_counts": Mean(count_ratios(ratio, batch.loss_mask), jnp.float32(0)),
    }
    return total, metrics


def count_ratios(ratio: jax.Array, mask: jax.Array) -> jax.Array:
    """How many ratios [S, U] where `mask` is True round to each multiple of RATIO_STEP: [RATIO_BUCKETS], float32.

    The last bucket also counts all ratios above it; NaN is in none. A bucket's number is split into two digits, and a
    product of two small matrices counts the pairs; they are float32, since GPUs multiply no booleans.
    """
    bucket = jnp.minimum(jnp.round(ratio / RATIO_STEP), RATIO_BUCKETS - 1)
    base = math.ceil(math.sqrt(RATIO_BUCKETS))
    tens = jnp.floor(bucket / base)
    ones = bucket - base * tens
    first = (tens[..., None] == jnp.arange(base)) & mask[..., None]
    second = ones[..., None] == jnp.arange(base)
    counts = jnp.einsum("brt,bro->to", first.astype(jnp.float32), second.astype(jnp.float32))
    return counts.reshape(-1)[:RATIO_BUCKETS]


def policy_token_loss(logprobs: jax.Array, batch: MicroBatch, options: ActorConfig) -> tuple[jax.Array, Metrics]:
    """The policy loss [S, U] of each token, times its importance weight if there are any, and the loss's metrics."""
    function, weights = named_loss(options.policy_loss.loss_mode), batch.importance_weights
    weighs_itself = needs(function, "importance_weights")
    available = {
        **loss_options(options),
        "selected": batch.selected,
        "sequences": batch.sequences,
        "importance_weights": jnp.ones_like(logprobs) if weights is None else weights,
    }
    token_loss, metrics = function(
        logprobs, batch.old_logprobs, batch.advantages, batch.loss_mask, **chosen(function, available)
    )
    if weights is not None and not weighs_itself:
        token_loss = token_loss * weights
    if options.off_policy_mask_threshold is None:
        return token_loss, dict(metrics)
    left_out = drifted(logprobs, batch, options, batch.sequences)
    return jnp.where(left_out, 0.0, token_loss), {**metrics, "off_policy_masked": Mean.of(left_out, batch.loss_mask)}


def drifted(logprobs: jax.Array, tokens: Tokens, options: ActorConfig, sequences: jax.Array | None = None) -> jax.Array:
    """Tokens that off-policy sequence masking leaves out, by how likely they were when they were sampled."""
    assert options.off_policy_mask_threshold is not None
    sampled = tokens.old_logprobs if tokens.sampled_logprobs is None else tokens.sampled_logprobs
    arrays = logprobs, sampled, tokens.advantages, tokens.loss_mask
    return off_policy_sequences(*arrays, threshold=options.off_policy_mask_threshold, sequences=sequences)


def build_statistics(settings: ActorSettings, mesh: Mesh, frozen: Any = None) -> WithFrozen:
    """(params, micro-batch) -> `TokenStatistics`, replicated over `mesh`, of a policy or a teacher."""

    def statistics(params, frozen, batch):
        return token_statistics(params, frozen, batch, settings, remat="none")[0]

    compiled = jax.jit(
        statistics, out_shardings=replicated(mesh), compiler_options=dict(settings.passes.compiler_options)
    )
    return WithFrozen(compiled, frozen)


def build_actor(settings: ActorSettings, mesh: Mesh, frozen: Any = None, *, decode_mesh: Mesh | None = None) -> Actor:
    """Compiles (on first use) the functions of a policy sharded over `mesh`.

    Args:
        frozen: with settings.lora, the weights that have the adapters, in the dtype of matrix products.
        decode_mesh: of the decoding weights: the same devices in the same order; None = `mesh`.
    """
    arch, lora, options = settings.passes.arch, settings.lora, settings.options
    compiler_options, loss = dict(settings.passes.compiler_options), options.policy_loss.loss_mode
    trainable = build_trainable(
        lambda params, frozen, batch: loss_fn(params, frozen, batch, settings),
        weight_table(arch) if lora is None else adapter_table(arch, lora),
        lambda seed: init_params(arch, seed) if lora is None else init_adapters(arch, lora, seed),
        options,
        mesh,
        compiler_options=compiler_options,
        dtype=settings.passes.dtype if lora is None else jnp.float32,  # adapters are scaled first
        frozen=frozen,
    )
    whole = replicated(mesh)

    def most_likely(params, frozen, batch):
        return most_likely_tokens(
            operands(params, frozen, settings),
            batch,
            settings.passes,
            chunk_size=options.logprob_chunk_size,
            count=candidates(settings.distillation),
        )

    def select(batch, logprobs):
        function, mask = SELECTIONS[loss], batch.loss_mask
        if options.off_policy_mask_threshold is not None:
            mask = mask & ~drifted(logprobs, batch, options)
        arrays = logprobs, batch.old_logprobs, batch.advantages, mask, batch.noise
        return function(*arrays, **chosen(function, loss_options(options)))

    most_likely = jax.jit(most_likely, out_shardings=whole, compiler_options=compiler_options)
    return Actor(
        trainable=trainable,
        decode_weights=build_decode_weights(arch, settings.passes.dtype, decode_mesh or mesh, lora, frozen),
        statistics=build_statistics(settings, mesh, frozen),
        most_likely=WithFrozen(most_likely, frozen),
        select=jax.jit(select, out_shardings=whole) if loss in SELECTIONS else None,
        experts_per_token=arch.experts.per_token if arch.experts is not None else 0,
    )
