"""Device: passes over a decoder-only transformer: training, prefill and decoding, all by `run_layers`.

Sizes: B rows, T tokens, D hidden, N query heads, K key-value heads, G = N // K, H head size, V vocabulary;
Q prompts of P tokens for prefill.

Precision: operands of matrix products are in the dtype of the weight, and on GPUs so are the results of a layer's
(`lora.writes_narrow`); everything else is float32.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dapo_jax.data.containers import Bins
from dapo_jax.models.architecture import Architecture
from dapo_jax.models.attention import BinAttention, capped, causal_attention, matmul
from dapo_jax.models.context import across_heads, on_all_devices, over_divided_sequences
from dapo_jax.models.experts import RoutingCounts, routing_counts
from dapo_jax.models.gated_delta import Inputs, State, last_tail, over_sequences
from dapo_jax.models.layers import (
    REPLAYED,
    KeyValue,
    Params,
    block,
    matrix_dtype,
    normed,
    rotary,
    run_layers,
    scores_of,
)
from dapo_jax.models.token_paths import paths_of
from dapo_jax.models.weights import weight_table
from dapo_jax.parallel.sharding import constrain_residual, constrain_rows, gather_weight, lookup

HEAD_AXES = "vocab", "embed"


def forward(
    params: Params,
    tokens: jax.Array,
    positions: jax.Array,
    mask: jax.Array,
    arch: Architecture,
    *,
    remat: str = "none",
) -> jax.Array:
    """Hidden states [B, T, D] float32 after the final norm, under causal attention.

    Args:
        params: weights, with "layers" as `run_layers` takes them.
        tokens, positions: [B, T] int32.
        mask: [B, T] bool, True on real tokens; padding may be anywhere.
        remat: what is saved for the backward pass, a name of models/remat.py's POLICIES.
    """
    hidden, _ = _causal_pass(params, tokens, positions, mask, arch, remat=remat, keep_cache=False)
    return hidden


def forward_bins(
    params: Params, bins: Bins, arch: Architecture, *, kernel: BinAttention, remat: str = "none"
) -> tuple[jax.Array, RoutingCounts | None]:
    """Hidden states [N, T, D] float32 after the final norm of the sequences in `bins`, and what the routers did.

    Equal to `forward` on each prompt with each response on its own, up to rounding.

    Args:
        params: weights, layers stacked.
        remat: as for `forward`.

    Returns:
        The hidden states, and the counts of the responses' tokens, stacked over the layers with experts; None without.
        A prompt's tokens are in as many bins as its responses, which depends on the mesh.
    """
    bins = on_all_devices(bins)
    rotations = rotary(constrain_rows(bins.positions), arch)
    attends = {kind: across_heads(kernel.attend(bins, scores_of(kind, arch))) for kind in arch.kinds if not kind.delta}
    recur = _recurrence(bins.trees, bins.branches, arch, over_divided_sequences)
    layers = params["layers"]
    if bins.experts is not None:
        layers = {**layers, REPLAYED: jnp.moveaxis(bins.experts, 2, 0)}

    def step(kind, x, layer, _):
        def attend(*arrays):
            return attends[kind](*arrays), None

        def recurred(inputs):
            return recur(inputs), None

        mix: Any = recurred if kind.delta else attend
        x, _, routing = block(kind, x, _gathered(layer, arch), rotations, mix, arch)
        if routing is not None:  # summed here: the probabilities of all layers would fill the memory
            routing = routing_counts(jax.lax.stop_gradient(routing), bins.branches > 0)
        return constrain_residual(x), routing

    x, found = run_layers(step, constrain_residual(embed(params, bins.tokens, arch)), layers, arch, remat=remat)
    counts = [of_layer for of_layer in found if of_layer is not None]
    return normed(x, params, "final_norm", arch), jax.tree.map(lambda *x: jnp.stack(x), *counts) if counts else None


def prefill(
    params: Params, tokens: jax.Array, mask: jax.Array, arch: Architecture
) -> tuple[jax.Array, list[KeyValue], jax.Array | None]:
    """Runs left-padded prompts [Q, P].

    Returns:
        The last hidden state [Q, D], each layer's keys [Q, K, H, P] and values [Q, K, P, H], or its `State`, and the
        experts of each token [Q, P, l, k] in the l layers that have them.
    """
    hidden, found = _causal_pass(params, tokens, positions_of(mask), mask, arch, remat="none", keep_cache=True)
    caches, chosen = zip(*found, strict=True)
    return hidden[:, -1], list(caches), chosen_experts(chosen)


def decode(
    attend: Callable[..., tuple[jax.Array, Any]],
    params: Params,
    tokens: jax.Array,
    positions: jax.Array,
    caches: list[Any],
    arch: Architecture,
) -> tuple[jax.Array, list[Any], jax.Array | None]:
    """Hidden states [B, D] of one token per row, the caches with that token written, and its experts [B, l, k].

    Args:
        attend: (kind, cache, query [B, 1, N, H], key, value [B, 1, K, H], sink [N] or None) -> (what is attended
            [B, 1, N, H], new cache); of layers with linear attention (kind, cache, gated_delta.Inputs) -> the same.
        params: weights, layers as a list.
        tokens, positions: [B] int32.
        caches: one of each layer, of any kind.
    """
    rotations = rotary(positions[:, None], arch)

    def step(kind, x, layer, cache):
        x, cache, routing = block(kind, x, layer, rotations, functools.partial(attend, kind, cache), arch)
        return x, (cache, None if routing is None else routing.chosen)

    x, found = run_layers(step, embed(params, tokens[:, None], arch), params["layers"], arch, caches=caches)
    new_caches, chosen = zip(*found, strict=True)
    experts = chosen_experts(chosen)
    return normed(x, params, "final_norm", arch)[:, 0], list(new_caches), None if experts is None else experts[:, 0]


def chosen_experts(layers: Iterable[jax.Array | None]) -> jax.Array | None:
    """The experts [B, T, l, k] that tokens used in the l layers that have some, from each layer's; None if none has."""
    chosen = [of_layer for of_layer in layers if of_layer is not None]
    return jnp.stack(chosen, axis=2) if chosen else None


def logits(params: Params, hidden: jax.Array, arch: Architecture, rounded: jax.Array | None = None) -> jax.Array:
    """Unnormalised float32 scores of the next token, [..., D] -> [..., V]; `rounded` as for `head_table`."""
    return capped(matmul("...d,vd->...v", hidden, head_table(params, rounded)), arch.logit_cap)


def head_table(params: Params, rounded: jax.Array | None = None) -> jax.Array:
    """The table [V, D] of the head, which may be the embedding, in the dtype of matrix products.

    Args:
        rounded: from `rounded_head`, for a table of several uses.
    """
    table: Any = gather_weight(_head(params), HEAD_AXES)
    if rounded is None:
        return table.astype(product_dtype(params))
    return _in_place_of(table, gather_weight(jax.lax.stop_gradient(rounded), HEAD_AXES))


def rounded_head(params: Params) -> jax.Array | None:
    """The head's table in the dtype of matrix products, cast once for several uses; None if it has that dtype."""
    table, dtype = _head(params), product_dtype(params)
    return None if table.dtype == dtype else table.astype(dtype)


def _head(params: Params) -> Any:
    return params["head"] if "head" in params else params["embedding"]


@jax.custom_vjp
def _in_place_of(table: jax.Array, rounded: jax.Array) -> jax.Array:
    """`rounded`; the gradients of its uses go to `table`, and so add up in float32."""
    return rounded


_in_place_of.defvjp(
    lambda table, rounded: (rounded, jnp.zeros((), table.dtype)),
    lambda like, cotangent: (cotangent.astype(like.dtype), None),
)


def product_dtype(params: Params) -> Any:
    """The dtype of the operands of matrix products.

    The layers' matrices have it. The tables of tokens may be float32: they are rounded where they are used, so that
    the gradients of their many uses add up in float32.
    """
    layers = params["layers"]
    return matrix_dtype(layers[0] if isinstance(layers, list) else layers)


def scalar(params: Params, hidden: jax.Array) -> jax.Array:
    """The scalar head: a value or a reward for each hidden state, [..., D] -> [...], float32."""
    return jnp.einsum("...d,d->...", hidden, params["score"], precision="highest")


def positions_of(mask: jax.Array) -> jax.Array:
    """Position of each real token among those of its row, [B, T] bool -> int32; 0 on padding before them."""
    return jnp.maximum(jnp.cumsum(mask, axis=-1, dtype=jnp.int32) - 1, 0)


def _causal_pass(params, tokens, positions, mask, arch, *, remat, keep_cache) -> tuple[jax.Array, list[Any]]:
    """The hidden states of `forward`, and with `keep_cache` each layer's keys and values, and its tokens' experts."""
    x = constrain_rows(embed(params, tokens, arch))
    rotations = rotary(positions, arch)
    recur = _recurrence(mask.astype(jnp.int32), jnp.zeros(mask.shape, jnp.int32), arch)

    def step(kind, x, layer, _):
        def attend(query, key, value, sink):
            cache = _cached(key, value) if keep_cache else None
            return causal_attention(query, key, value, mask, scores_of(kind, arch), sink), cache

        def recurred(inputs):
            read, state = recur(inputs)
            if not keep_cache:
                return read, None
            return read, State(last_tail(inputs.channels, mask, inputs.filter.shape[1]), state)

        mix: Any = recurred if kind.delta else attend
        x, cache, routing = block(kind, x, layer, rotations, mix, arch)
        return constrain_rows(x), (cache, routing.chosen if keep_cache and routing is not None else None)

    x, found = run_layers(step, x, params["layers"], arch, remat=remat)
    return normed(x, params, "final_norm", arch), found


def _recurrence(
    trees: jax.Array, branches: jax.Array, arch: Architecture, over: Callable[..., Any] = over_sequences
) -> Callable[[Inputs], Any]:
    """`over` of bins with these trees and branches [B, T], for all layers with linear attention."""
    if arch.delta is None:
        return lambda inputs: inputs
    return functools.partial(over, paths=paths_of(trees, branches, arch.delta.filter_width), delta=arch.delta)


def _gathered(layer: Params, arch: Architecture) -> Params:
    """The weights of a layer, gathered over fsdp; adapters, which are small, stay as they are."""
    axes = {weight.path[1]: weight.axes[1:] for weight in weight_table(arch) if weight.stacked}
    return {name: gather_weight(leaf, axes[name]) if name in axes else leaf for name, leaf in layer.items()}


def _cached(key: jax.Array, value: jax.Array) -> KeyValue:
    """Keys and values [B, T, K, H] as prefill returns them: [B, K, H, T] and [B, K, T, H]."""
    return jnp.moveaxis(key, 1, 3), value.swapaxes(1, 2)


def embed(params: Params, tokens: jax.Array, arch: Architecture) -> jax.Array:
    """Token embeddings [B, T, D] float32."""
    table, dtype = params["embedding"], product_dtype(params)
    found = lookup(table, tokens).astype(jnp.float32)
    if table.dtype != dtype:  # unlike two casts, no compiler removes this
        found = jax.lax.reduce_precision(found, jnp.finfo(dtype).nexp, jnp.finfo(dtype).nmant)
    if arch.scale_embeddings:
        found *= float(np.asarray(arch.hidden_size**0.5, dtype))  # rounded, as the model was trained
    return found
