"""Device: a feed-forward layer whose tokens choose a few of many experts (Qwen3-MoE, arXiv:2505.09388; with scores of
each expert alone and biases, GLM-4.5, arXiv:2508.06471; with biases of all products, gpt-oss, arXiv:2508.10925).

Sizes: B rows, T tokens, D hidden, F hidden of an expert, E experts, k of them chosen by a token, S = B * T.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec

from dapo_jax.models.architecture import Experts
from dapo_jax.models.attention import matmul
from dapo_jax.models.expert_exchange import AXIS, exchanged, sorted_choices
from dapo_jax.models.grouped_products import grouped_product
from dapo_jax.parallel.mesh import BATCH_AXES, EXPERT_AXES


@struct.dataclass
class Routing:
    """What the router of a layer did."""

    chosen: jax.Array  # [B, T, k] int32, the experts in use, by falling weight of the router that chose them
    probabilities: jax.Array  # [B, T, E] float32, this router's; of scores of each alone, shares of their sum
    own: jax.Array | None  # [B, T, k] int32, what this router would have chosen, if choices were replayed


def expert_feed_forward(
    x: jax.Array,
    router: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    *,
    experts: Experts,
    bias: jax.Array | None = None,
    logit_bias: jax.Array | None = None,
    biases: tuple[jax.Array, ...] = (),
    replayed: jax.Array | None = None,
) -> tuple[jax.Array, Routing]:
    """[B, T, D] float32: down(silu(gate(x)) * up(x)) of each token's experts, summed by their scores.

    Under the mesh of `jax.set_mesh`, rows are sharded over ("data", "fsdp", "expert"), their tokens over "context" and
    experts over ("expert", "tensor"): each device computes what its tokens, and those of the devices along "expert",
    want of its experts. Inside a shard_map over some of these axes, the others shard its local arrays. No token is
    dropped.

    Args:
        x: [B, T, D] float32.
        router: [D, E] float32.
        gate, up: [E, D, F], in the dtype of products, as `down` [E, F, D].
        bias: [E] float32, added to the scores by which experts are chosen, and not to their weights. It has no
            gradient.
        logit_bias: [E] float32, added to the router's logits; it has one.
        biases: none, or of gate and up [E, F] and of down [E, D], float32, rounded as their weights are.
        replayed: [B, T, k] int, experts to use instead of this router's choice, with this router's scores.
            A token with a negative one takes its own choice.
    """
    compute = functools.partial(_on_device, experts=experts)
    mesh = jax.sharding.get_abstract_mesh()
    axes = set(mesh.axis_names) - set(mesh.manual_axes)  # an enclosing shard_map has already split the others
    if not axes:
        return compute(x, replayed, router, bias, logit_bias, biases, gate, up, down)
    rows = PartitionSpec(tuple(axis for axis in BATCH_AXES if axis in axes), "context" if "context" in axes else None)
    shares = tuple(axis for axis in EXPERT_AXES if axis in axes)
    share, parts, whole = PartitionSpec(shares), PartitionSpec("tensor", *rows), PartitionSpec()
    shards = math.prod(mesh.shape[axis] for axis in shares) if AXIS in axes else 0

    def of_share(*arrays: Any) -> tuple[jax.Array, Routing]:
        first = jax.lax.axis_index(shares) * arrays[-1].shape[0]
        result, routing = compute(*arrays, first_expert=first, shards=shards)
        return result[None], routing

    result, routing = jax.shard_map(
        of_share,
        in_specs=(rows, rows, whole, whole, whole, share, share, share, share),
        out_specs=(parts, rows),
        axis_names=axes,
        check_vma=False,
    )(x, replayed, router, bias, logit_bias, biases, gate, up, down)
    # Summed here and not by a psum, whose transpose is another one: the gradient needs none.
    return result.sum(axis=0), routing


def _on_device(
    x: jax.Array,
    replayed: jax.Array | None,
    router: jax.Array,
    bias: jax.Array | None,
    logit_bias: jax.Array | None,
    biases: tuple[jax.Array, ...],
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    *,
    experts: Experts,
    first_expert: jax.Array | int = 0,
    shards: int = 0,
) -> tuple[jax.Array, Routing]:
    """`expert_feed_forward` on one device, of the experts from `first_expert` on whose weights it has.

    Args:
        shards: devices that share all experts, if "expert" divides them; else 0.
    """
    weights, routing = _route(x, router, bias, logit_bias, replayed, experts)
    tokens, matrices = x.reshape(-1, x.shape[-1]), (gate, up, down, *biases)
    of_rows = functools.partial(_of_rows, experts)
    if shards:
        chosen, weights = (one.reshape(len(tokens), -1) for one in (routing.chosen, weights))
        result: Any = exchanged(of_rows, shards, tokens, weights, chosen, first_expert, matrices)
        return result.reshape(x.shape), routing
    order, places, sizes = sorted_choices(routing.chosen - first_expert, len(gate))
    rows = _rows_of_choices(tokens, order, places)
    of_choices = _rows_of_choices(weights.reshape(-1, 1), order, places.reshape(-1, 1))[:, 0]
    return _sums_of_choices(of_rows(rows, of_choices, matrices, sizes), order, places).reshape(x.shape), routing


def _of_rows(
    experts: Experts, rows: jax.Array, weights: jax.Array, matrices: tuple[jax.Array, ...], sizes: jax.Array
) -> jax.Array:
    """[M, D] float32 of rows [M, D] sorted by expert and of their weights [M], of experts with `sizes` rows each.

    Args:
        matrices: gate, up and down of each expert, and their biases if they have some.
    """
    gate, up, down, *biases = matrices
    gated, upward = grouped_product(rows, gate, sizes), grouped_product(rows, up, sizes)
    added = [_of_groups(one.astype(gate.dtype), sizes, len(rows)) for one in biases]
    if added:
        gated, upward = gated + added[0], upward + added[1]
    # Weighted before the last product, whose result is then not needed in the backward pass.
    result = grouped_product(_gated(gated, upward, experts) * weights[:, None], down, sizes)
    return result + added[2] * weights[:, None] if added else result


def _gated(gate: jax.Array, up: jax.Array, experts: Experts) -> jax.Array:
    """What the last product of an expert takes."""
    if experts.clamp is None:
        return jax.nn.silu(gate) * up
    gate, up = jnp.minimum(gate, experts.clamp), jnp.clip(up, -experts.clamp, experts.clamp)
    return gate * jax.nn.sigmoid(experts.slope * gate) * (up + 1)


def _of_groups(biases: jax.Array, sizes: jax.Array, rows: int) -> jax.Array:
    """The bias [S * k, F] of each sorted row's expert, of `biases` [E, F]: a product, whose gradient has no scatter."""
    ends, place = jnp.cumsum(sizes), jnp.arange(rows)[:, None]
    is_own = (place >= ends - sizes) & (place < ends)
    return matmul("se,ef->sf", is_own.astype(biases.dtype), biases)


def _route(
    x: jax.Array,
    router: jax.Array,
    bias: jax.Array | None,
    logit_bias: jax.Array | None,
    replayed: jax.Array | None,
    experts: Experts,
) -> tuple[jax.Array, Routing]:
    """The weights [B, T, k] float32 of the experts in use, and the routing."""
    logits = matmul("btd,de->bte", x, router) + (0.0 if logit_bias is None else logit_bias)
    scores = jax.nn.softmax(logits, axis=-1) if experts.scores == "softmax" else jax.nn.sigmoid(logits)
    _, chosen = jax.lax.top_k(jax.lax.stop_gradient(scores if bias is None else scores + bias), experts.per_token)
    own = None
    if replayed is not None:
        recorded = (replayed >= 0).all(axis=-1, keepdims=True)
        chosen, own = jnp.where(recorded, replayed, chosen).astype(jnp.int32), chosen
    weights = jnp.sum(jnp.where(_is_expert(chosen, scores), scores[..., None, :], 0), axis=-1)
    if experts.normalized:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    if experts.scores != "softmax":
        scores = scores / scores.sum(axis=-1, keepdims=True)
    return weights * experts.scale if experts.scale != 1.0 else weights, Routing(chosen, scores, own)


def _is_expert(chosen: jax.Array, probabilities: jax.Array) -> jax.Array:
    """[B, T, k, E] bool, True at each choice. To pick by it is faster on TPUs than to gather and scatter numbers."""
    return chosen[..., None] == jnp.arange(probabilities.shape[-1])


@jax.custom_vjp
def _rows_of_choices(x: jax.Array, order: jax.Array, places: jax.Array) -> jax.Array:
    """Sorted rows [S * k, D], a copy of x [S, D] for each choice. Its gradient is a sum without a scatter."""
    return x[order // places.shape[1]]


@jax.custom_vjp
def _sums_of_choices(rows: jax.Array, order: jax.Array, places: jax.Array) -> jax.Array:
    """[S, D]: the sum over the choices of the sorted rows [S * k, D]; the transpose of `_rows_of_choices`."""
    return rows[places].sum(axis=1)


_rows_of_choices.defvjp(
    lambda x, *where: (_rows_of_choices(x, *where), where),
    lambda where, cotangent: (_sums_of_choices(cotangent, *where), None, None),
)
_sums_of_choices.defvjp(
    lambda rows, *where: (_sums_of_choices(rows, *where), where),
    lambda where, cotangent: (_rows_of_choices(cotangent, *where), None, None),
)


@struct.dataclass
class RoutingCounts:
    """Sums over tokens, which may be added up over batches and layers, or stacked."""

    chosen: jax.Array  # [E] float32, tokens of each expert
    probabilities: jax.Array  # [E] float32, sum of the tokens' probabilities
    choices: jax.Array  # float32, pairs of a token and an expert in use
    replaced: jax.Array  # float32, those of them that the router would not have chosen

    def merge(self, other: "RoutingCounts") -> "RoutingCounts":
        return jax.tree.map(jnp.add, self, other)

    def across(self, axis: str) -> "RoutingCounts":
        """Inside a shard_map: merged over the devices along `axis`."""
        return jax.lax.psum(self, axis)


def routing_counts(routing: Routing, mask: jax.Array) -> RoutingCounts:
    """The sums over the tokens where mask [B, T] is True."""
    weight = mask.astype(jnp.float32)
    chosen = jnp.sum(_is_expert(routing.chosen, routing.probabilities) * weight[..., None, None], axis=(0, 1, 2))
    replaced = jnp.zeros(())
    if routing.own is not None:
        known = (routing.chosen[..., :, None] == routing.own[..., None, :]).any(axis=-1)
        replaced = jnp.sum(~known * weight[..., None])
    probabilities = jnp.sum(routing.probabilities * weight[..., None], axis=(0, 1))
    return RoutingCounts(chosen, probabilities, weight.sum() * routing.chosen.shape[-1], replaced)


def load_balancing_loss(counts: RoutingCounts, experts_per_token: int) -> jax.Array:
    """E * sum over experts of tokens per token * mean probability (arXiv:2101.03961), as transformers computes it.

    Args:
        counts: summed over all layers. k experts with equal loads give k.
    """
    tokens = jnp.maximum(counts.choices / experts_per_token, 1.0)
    return counts.chosen.shape[-1] * jnp.sum(counts.chosen / tokens * counts.probabilities / tokens, axis=-1)


def relative_loads(counts: RoutingCounts) -> jax.Array:
    """Tokens of each expert [..., E] over the mean; of each layer, if counts are stacked. 0 without tokens."""
    mean = counts.chosen.mean(axis=-1, keepdims=True)
    return counts.chosen / jnp.where(mean > 0, mean, 1.0)


def replaced_share(counts: RoutingCounts) -> jax.Array:
    """The share of the choices in use that the router would not have made."""
    return counts.replaced / jnp.maximum(counts.choices, 1.0)
