"""Device: one transformer layer, and the one way through all of them.

Sizes: B rows, T tokens, D hidden, H head size, L layers.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from dapo_jax.models.architecture import Architecture, Layer
from dapo_jax.models.attention import Scores, matmul
from dapo_jax.models.experts import Routing, expert_feed_forward
from dapo_jax.models.gated_delta import gated_delta
from dapo_jax.models.lora import adapted, writes_narrow
from dapo_jax.models.remat import rematerialized
from dapo_jax.models.rope_scaling import YarnRopeScaling
from dapo_jax.parallel.sharding import gather_input

Params = dict[str, Any]
KeyValue = tuple[jax.Array, jax.Array]
ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True)}
Rotations = Mapping[float | None, KeyValue]
EXPERT_BIASES = "expert_gate_bias", "expert_up_bias", "expert_down_bias"
REPLAYED = "expert_choice"  # a leaf next to the weights of a layer with experts: those that its tokens must use


def run_layers(
    step: Callable[[Layer, Any, Params, Any], tuple[Any, Any]],
    hidden: Any,
    weights: Params | list[Params],
    arch: Architecture,
    *,
    caches: list[Any] | None = None,
    remat: str = "none",
) -> tuple[Any, list[Any]]:
    """Takes `hidden` through the L layers, by `step` (kind, hidden, weights, cache) -> (hidden, result).

    Stacked weights are scanned, one repetition of the pattern of kinds at a time, unless there are caches. The first
    layers, those after the last whole repetition, with caches or in a list are unrolled.

    Args:
        hidden: what one layer hands to the next, a pytree.
        weights: stacked in one pytree, or a list of L pytrees.
        caches: what `step` gets for each layer; None: it gets None.
        remat: what is saved for the backward pass, a name of models/remat.py's POLICIES.

    Returns:
        `hidden` after the last layer, and the result of each layer.
    """
    steps = {kind: rematerialized(functools.partial(step, kind), remat) for kind in arch.layers}
    results: list[Any] = []

    def unrolled(hidden: Any, end: int) -> Any:
        places = range(len(results), end)
        if not places:
            return hidden
        layers = weights if isinstance(weights, list) else layer_weights(weights, arch)
        for place in places:
            cache = None if caches is None else caches[place]
            hidden, result = steps[arch.layers[place]](hidden, layers[place], cache)
            results.append(result)
        return hidden

    if caches is None and not isinstance(weights, list):
        hidden, scanned = _scan_repetitions(steps, unrolled(hidden, len(arch.first)), weights, arch)
        results += scanned
    return unrolled(hidden, arch.num_layers), results


def _scan_repetitions(
    steps: Mapping[Layer, Callable[..., Any]], hidden: Any, weights: Params, arch: Architecture
) -> tuple[Any, list[Any]]:
    """`hidden` after the layers of all whole repetitions of the pattern, and the result of each of these layers."""
    pattern, first = arch.pattern, len(arch.first)
    repetitions = (arch.num_layers - first) // len(pattern)
    places = {name: [i - first for i in arch.layers_with(name) if 0 <= i - first < len(pattern)] for name in weights}

    def divided(leaf: jax.Array, name: str, of_pattern: int) -> jax.Array:
        begin, whole = sum(i < first for i in arch.layers_with(name)), repetitions * of_pattern
        leaf = leaf if len(leaf) == whole else leaf[begin : begin + whole]
        return leaf if of_pattern == 1 else leaf.reshape(repetitions, of_pattern, *leaf.shape[1:])

    def of_place(leaf: jax.Array, name: str, place: int) -> jax.Array:
        return leaf if len(places[name]) == 1 else leaf[places[name].index(place)]

    def repetition(hidden: Any, weights: Params) -> tuple[Any, list[Any]]:
        found = []
        for place, kind in enumerate(pattern):
            layer = {name: of_place(leaf, name, place) for name, leaf in weights.items() if place in places[name]}
            hidden, result = steps[kind](hidden, layer, None)
            found.append(result)
        return hidden, found

    scanned = {name: divided(leaf, name, len(places[name])) for name, leaf in weights.items() if places[name]}
    hidden, found = jax.lax.scan(repetition, hidden, scanned)
    return hidden, [jax.tree.map(lambda x, i=i: x[i], one) for i in range(repetitions) for one in found]


def layer_weights(weights: Params, arch: Architecture) -> list[Params]:
    """The weights of each layer, from stacked ones."""
    places = {name: arch.layers_with(name) for name in weights}
    return [
        {name: leaf[places[name].index(layer)] for name, leaf in weights.items() if layer in places[name]}
        for layer in range(arch.num_layers)
    ]


def scores_of(kind: Layer, arch: Architecture) -> Scores:
    """Which keys a layer's attention sees, and how it caps their scores."""
    return Scores(kind.window, arch.attention_cap)


def block(
    kind: Layer,
    x: jax.Array,
    layer: Params,
    rotations: Rotations,
    attend: Callable[..., tuple[jax.Array, Any]],
    arch: Architecture,
) -> tuple[jax.Array, Any, Routing | None]:
    """One transformer layer: [B, T, D] -> [B, T, D], the cache that `attend` returns, and what its router did.

    Args:
        layer: the layer's weights.
        rotations: from `rotary`.
        attend: (query [B, T, N, H], key, value [B, T, K, H], sink [N] or None) -> (what is attended [B, T, N, H],
            cache); of a layer with linear attention, as `gated_delta` takes it.
    """
    inputs = gather_input(normed(x, layer, "attention_norm", arch), matrix_dtype(layer))
    if kind.delta:
        attended, cache = gated_delta(inputs, layer, attend, arch)
    else:
        attended, cache = _attention(kind, inputs, layer, rotations, attend, arch)
    x = x + normed(attended, layer, "attention_out_norm", arch)
    inputs, routing = normed(x, layer, "mlp_norm", arch), None
    if kind.experts:
        assert arch.experts is not None
        result, routing = expert_feed_forward(
            inputs,
            *(layer[name] for name in ("router", "expert_gate", "expert_up", "expert_down")),
            experts=arch.experts,
            bias=layer.get("router_bias"),
            logit_bias=layer.get("router_logit_bias"),
            biases=tuple(layer[name] for name in EXPERT_BIASES if name in layer),
            replayed=layer.get(REPLAYED),
        )
        if arch.experts.shared_size:
            shared = _feed_forward(inputs, layer, arch, "shared_")
            if arch.experts.shared_gated:
                shared *= jax.nn.sigmoid(matmul("btd,do->bto", inputs, layer["shared_score"]))
            result = result + shared
    else:
        result = _feed_forward(inputs, layer, arch)
    return x + normed(result, layer, "mlp_out_norm", arch), cache, routing


def matrix_dtype(layer: Params) -> Any:
    """The dtype of a layer's matrices, the operands of its products."""
    return layer["query" if "query" in layer else "delta_mixed"].dtype


def _attention(
    kind: Layer, x: jax.Array, layer: Params, rotations: Rotations, attend: Callable[..., Any], arch: Architecture
) -> tuple[jax.Array, Any]:
    """What attention adds to the residual stream, and the cache of `attend`."""
    query, key, value, gate = _projections(kind, x, layer, rotations, arch)
    attended, cache = attend(query, key, value, layer.get("sink"))
    attended = attended if gate is None else attended * jax.nn.sigmoid(gate)
    return biased(adapted("btnh,nhd->btd", attended, layer, "output"), layer, "output"), cache


def _projections(kind: Layer, x: jax.Array, layer: Params, rotations: Rotations, arch: Architecture) -> Any:
    """Query, key and value of each head, in the dtype of matrix products, and the gate of what is attended or None."""
    query, gate = biased(adapted("btd,dnh->btnh", x, layer, "query"), layer, "query"), None
    key = biased(adapted("btd,dkh->btkh", x, layer, "key"), layer, "key")
    value = biased(adapted("btd,dkh->btkh", x, layer, "value"), layer, "value")
    if arch.gated_attention:
        query, gate = jnp.split(query, 2, axis=-1)
    if arch.qk_norm:
        axes = (-2, -1) if arch.qk_norm == "projection" else -1
        query, key = (normed(one, layer, name, arch, axes) for one, name in ((query, "query_norm"), (key, "key_norm")))
    if arch.query_scale != 1.0:
        query = query * arch.query_scale
    if kind.rotary:
        query, key = rotate(query, rotations[kind.theta]), rotate(key, rotations[kind.theta])
    dtype = layer["query"].dtype
    query, key, value = query.astype(dtype), key.astype(dtype), value.astype(dtype)
    return *map(checkpoint_name, (query, key, value), ("query", "key", "value")), gate


def _feed_forward(x: jax.Array, layer: Params, arch: Architecture, prefix: str = "") -> jax.Array:
    """A dense network, whose leaves' names begin with `prefix`."""
    own = {name.removeprefix(prefix): leaf for name, leaf in layer.items() if name.startswith(prefix)}
    x = gather_input(x, own["gate"].dtype)
    gate = biased(adapted("btd,df->btf", x, own, "gate"), own, "gate")
    up = biased(adapted("btd,df->btf", x, own, "up"), own, "up")
    down = {name: leaf for name, leaf in own.items() if name.startswith("down")}
    product = _product_in_one_read if writes_narrow() else _gated_product
    return biased(product(gate, up, down, arch.activation), own, "down")


def _gated_product(gate: jax.Array, up: jax.Array, down: Params, activation: str) -> jax.Array:
    """The product of activation(gate) * up [B, T, F] with the matrix of `down`: [B, T, D]."""
    return adapted("btf,fd->btd", ACTIVATIONS[activation](gate) * up, down, "down")


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _product_in_one_read(gate: jax.Array, up: jax.Array, down: Params, activation: str) -> jax.Array:
    """`_gated_product`, whose backward pass reads gate and up once, in a kernel that writes all that products need.

    XLA:GPU merges kernels whose common operands are not results of its own products: hence the barrier.
    """
    return _gated_product(gate, up, down, activation)


def _forward_in_one_read(gate: jax.Array, up: jax.Array, down: Params, activation: str) -> tuple[jax.Array, Any]:
    return _gated_product(gate, up, down, activation), (gate, up, down)


def _backward_in_one_read(activation: str, saved: Any, cotangent: jax.Array) -> tuple[jax.Array, jax.Array, Params]:
    *operands, down = saved
    narrow = jax.lax.optimization_barrier([x.astype(down["down"].dtype) for x in operands])
    gate, up = (x.astype(jnp.float32) for x in narrow)
    active, slope = jax.jvp(ACTIVATIONS[activation], (gate,), (jnp.ones_like(gate),))
    _, pullback = jax.vjp(lambda x, down: adapted("btf,fd->btd", x, down, "down"), active * up, down)
    of_product, of_down = pullback(cotangent)
    return of_product * up * slope, of_product * active, of_down


_product_in_one_read.defvjp(_forward_in_one_read, _backward_in_one_read)


def biased(x: jax.Array, layer: Params, name: str) -> jax.Array:
    """`x` with the bias of a projection, if it has one."""
    bias = layer.get(f"{name}_bias")
    return x if bias is None else x + bias


def normed(x: jax.Array, weights: Params, name: str, arch: Architecture, axes: int | tuple[int, ...] = -1) -> jax.Array:
    """Root-mean-square norm over `axes`, in float32 (arXiv:1910.07467), if `weights` have it; else `x`."""
    scale = weights.get(name)
    if scale is None:
        return x
    scale = scale + arch.norm_offset if arch.norm_offset else scale
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=axes, keepdims=True) + arch.rms_norm_eps) * scale


def rotary(positions: jax.Array, arch: Architecture) -> Rotations:
    """Cosine and sine [B, T, R // 2] float32 of each rotary embedding (arXiv:2104.09864), by `Layer.theta`.

    R is arch.rotary_size, or H.
    """
    return {kind.theta: _rotation(positions, kind.theta, arch) for kind in arch.kinds if kind.rotary}


def _rotation(positions: jax.Array, theta: float | None, arch: Architecture) -> KeyValue:
    angles = positions[..., None].astype(jnp.float32) * rotary_frequencies(arch, theta)
    cosine, sine = jnp.cos(angles), jnp.sin(angles)
    if theta is None and isinstance(arch.rope_scaling, YarnRopeScaling):
        factor = arch.rope_scaling.attention_factor
        return cosine * factor, sine * factor
    return cosine, sine


def rotary_frequencies(arch: Architecture, theta: float | None = None) -> np.ndarray:
    """Angular frequency of each pair of dimensions, [R // 2] float32, scaled if the architecture says so.

    Args:
        theta: the base of an embedding that is not scaled; None: the architecture's.
    """
    base, scaling = (arch.rope_theta, arch.rope_scaling) if theta is None else (theta, None)
    size = arch.rotary_size or arch.head_dim
    frequencies = base ** -(np.arange(0, size, 2, dtype=np.float64) / size)
    return (frequencies if scaling is None else scaling.scaled(frequencies)).astype(np.float32)


def rotate(x: jax.Array, rotation: KeyValue) -> jax.Array:
    """Applies the rotary embedding to the first R of [B, T, heads, H]; dimension i is paired with i + R // 2."""
    cosine, sine = (part[:, :, None] for part in rotation)
    half = cosine.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    rotated = [first * cosine - second * sine, second * cosine + first * sine]
    return jnp.concatenate([*rotated, rest] if rest.shape[-1] else rotated, axis=-1)
