"""Device: passes over a decoder-only transformer: training, prefill and decoding, all by `run_layers`.

Sizes: B rows, T tokens, D hidden, N query heads, K key-value heads, G = N // K, H head size, V vocabulary;
for decoding Q prompts with B // Q samples each, P prompt width, W width of the generated part.

Precision: operands of matrix products are in the dtype of the weight, everything else is float32.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from dapo_jax.models.architecture import Architecture
from dapo_jax.models.attention import attention, causal, matmul, shared_prompt_attention
from dapo_jax.models.layers import KeyValue, Params, block, rms_norm, rotary, run_layers, unstacked
from dapo_jax.models.weights import weight_table
from dapo_jax.parallel.sharding import constrain_residual, constrain_rows, gather_weight, lookup

AttentionKernel = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


@struct.dataclass
class LayerCache:
    """Keys and values of one layer. The samples of a prompt share its part of the cache."""

    prompt_key: jax.Array  # [Q, K, H, P]
    prompt_value: jax.Array  # [Q, K, P, H]
    key: jax.Array  # [B, K, H, W] of sampled tokens, written at one index for all rows
    value: jax.Array  # [B, K, W, H]

    @property
    def window(self) -> int:
        """W, the number of tokens that each row has room for."""
        return self.value.shape[2]


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


def forward_responses(
    params: Params,
    prompts: jax.Array,
    prompt_mask: jax.Array,
    responses: jax.Array,
    mask: jax.Array,
    arch: Architecture,
    *,
    remat: str = "none",
) -> jax.Array:
    """Hidden states [B, R, D] float32 that predict each response token; each prompt is run once.

    Equal to `forward` on the prompt repeated before every response, up to rounding.

    Args:
        params: weights, layers stacked.
        prompts, prompt_mask: [Q, P], left-padded; prompt q belongs to rows q * (B // Q) and following.
        responses, mask: [B, R], right-padded.
        remat: as for `forward`.
    """
    samples = responses.shape[0] // prompts.shape[0]
    length = max(responses.shape[1] - 1, 1)  # the last token predicts nothing
    visible = causal(length, mask[:, :length])
    prompt_visible = causal(prompts.shape[1], prompt_mask)
    prompt_lengths = jnp.repeat(jnp.sum(prompt_mask, axis=-1, dtype=jnp.int32), samples)
    prompt_rotation = rotary(positions_of(prompt_mask), arch)
    rotation = rotary(prompt_lengths[:, None] + jnp.arange(length), arch)

    def step(kind, hidden, layer, _):
        layer = _gathered(layer, arch)

        def attend_prompt(query, key, value):
            return attention(query, key, value, prompt_visible), _cached(key, value)

        prompt, shared = block(kind, hidden[0], layer, prompt_rotation, attend_prompt, arch)

        def attend(query, key, value):
            key, value = _cached(key, value)
            return shared_prompt_attention(query, key, value, visible, shared[0], shared[1], prompt_mask), None

        response, _ = block(kind, hidden[1], layer, rotation, attend, arch)
        return (constrain_residual(prompt), constrain_residual(response)), None

    hidden = constrain_residual(embed(params, prompts)), constrain_residual(embed(params, responses[:, :length]))
    (prompt, response), _ = run_layers(step, hidden, params["layers"], arch, remat=remat)
    first = jnp.repeat(prompt[:, -1:], samples, axis=0)
    hidden = jnp.concatenate([first, response], axis=1)[:, : responses.shape[1]]
    return rms_norm(hidden, params["final_norm"], arch.rms_norm_eps)


def forward_contiguous(
    params: Params,
    prompts: jax.Array,
    prompt_mask: jax.Array,
    responses: jax.Array,
    mask: jax.Array,
    arch: Architecture,
    *,
    attention_kernel: AttentionKernel,
    remat: str = "none",
) -> jax.Array:
    """What `forward_responses` returns, with rows as kernels take them: each prompt directly before its response.

    Args:
        prompts, prompt_mask: [B, P], left-padded: one per row.
        attention_kernel: (query, key, value, lengths) -> [B, T, N, H], see models/fused_attention.py.
    """
    width, length = prompts.shape[1], max(responses.shape[1] - 1, 1)  # the last token predicts nothing
    real = jnp.concatenate([prompt_mask, mask[:, :length]], axis=1)
    tokens = jnp.concatenate([prompts, responses[:, :length]], axis=1)
    prompt_lengths = jnp.sum(prompt_mask, axis=1, dtype=jnp.int32)
    lengths = jnp.sum(real, axis=1, dtype=jnp.int32)
    places = jnp.arange(tokens.shape[1])
    tokens = shift_left(tokens, width - prompt_lengths, most=width)
    rotation = rotary(jnp.broadcast_to(places, tokens.shape), arch)

    def attend(query, key, value):
        return attention_kernel(query, key, value, lengths), None

    def step(kind, x, layer, _):
        x, _ = block(kind, x, _gathered(layer, arch), rotation, attend, arch)
        return constrain_residual(x), None

    x, _ = run_layers(step, constrain_residual(embed(params, tokens)), params["layers"], arch, remat=remat)
    hidden = shift_left(x, jnp.maximum(prompt_lengths - 1, 0), most=width)[:, : responses.shape[1]]
    return rms_norm(hidden, params["final_norm"], arch.rms_norm_eps)


def prefill(params: Params, tokens: jax.Array, mask: jax.Array, arch: Architecture) -> tuple[jax.Array, list[KeyValue]]:
    """Last hidden state [Q, D] of left-padded prompts [Q, P]; each layer's keys and values as a LayerCache has them."""
    hidden, caches = _causal_pass(params, tokens, positions_of(mask), mask, arch, remat="none", keep_cache=True)
    caches = caches if isinstance(caches, list) else unstacked(caches, arch.num_layers)
    return hidden[:, -1], caches


def decode(
    params: Params,
    tokens: jax.Array,
    positions: jax.Array,
    prompt_mask: jax.Array,
    caches: list[LayerCache],
    index: jax.Array,
    arch: Architecture,
) -> tuple[jax.Array, list[LayerCache]]:
    """Hidden states [B, D] of one token per row, and the caches with that token written.

    Args:
        params: weights, layers as a list.
        tokens, positions: [B] int32.
        prompt_mask: [Q, P] bool, True on real prompt tokens.
        index: scalar, how many tokens each row has sampled before this one.
    """
    x = embed(params, tokens[:, None])
    rotation = rotary(positions[:, None], arch)
    visible = (jnp.arange(caches[0].window) <= index)[None, None]

    def step(kind, x, layer, cache):
        def attend(query, key, value):
            new = _write(cache, key, value, index)
            attended = shared_prompt_attention(
                query, new.key, new.value, visible, new.prompt_key, new.prompt_value, prompt_mask
            )
            return attended, new

        return block(kind, x, layer, rotation, attend, arch)

    x, caches = run_layers(step, x, params["layers"], arch, caches=caches)
    return rms_norm(x, params["final_norm"], arch.rms_norm_eps)[:, 0], caches


def logits(params: Params, hidden: jax.Array) -> jax.Array:
    """Unnormalised float32 scores of the next token, [..., D] -> [..., V]."""
    return matmul("...d,vd->...v", hidden, head_table(params))


def head_table(params: Params) -> jax.Array:
    """The table [V, D] of the head, which may be the embedding, in the dtype of matrix products."""
    table: Any = gather_weight(params["head"] if "head" in params else params["embedding"], ("vocab", "embed"))
    return table.astype(product_dtype(params))


def product_dtype(params: Params) -> Any:
    """The dtype of the operands of matrix products.

    The layers' matrices have it. The tables of tokens may be float32: they are rounded where they are used, so that
    the gradients of their many uses add up in float32.
    """
    layers = params["layers"]
    return (layers[0] if isinstance(layers, list) else layers)["query"].dtype


def scalar(params: Params, hidden: jax.Array) -> jax.Array:
    """The scalar head: a value or a reward for each hidden state, [..., D] -> [...], float32."""
    return jnp.einsum("...d,d->...", hidden, params["score"], precision="highest")


def positions_of(mask: jax.Array) -> jax.Array:
    """Position of each real token among those of its row, [B, T] bool -> int32; 0 on padding before them."""
    return jnp.maximum(jnp.cumsum(mask, axis=-1, dtype=jnp.int32) - 1, 0)


def _causal_pass(params, tokens, positions, mask, arch, *, remat, keep_cache) -> tuple[jax.Array, Any]:
    """The hidden states of `forward`, and with `keep_cache` each layer's keys and values."""
    x = constrain_rows(embed(params, tokens))
    rotation = rotary(positions, arch)
    visible = causal(mask.shape[1], mask)

    def step(kind, x, layer, _):
        def attend(query, key, value):
            cache = _cached(key, value) if keep_cache else None
            return attention(query, key, value, visible), cache

        x, cache = block(kind, x, layer, rotation, attend, arch)
        return constrain_rows(x), cache

    x, caches = run_layers(step, x, params["layers"], arch, remat=remat)
    return rms_norm(x, params["final_norm"], arch.rms_norm_eps), caches


def _gathered(layer: Params, arch: Architecture) -> Params:
    """The weights of a layer, gathered over fsdp; adapters, which are small, stay as they are."""
    axes = {weight.path[1]: weight.axes[1:] for weight in weight_table(arch) if weight.stacked}
    return {name: gather_weight(leaf, axes[name]) if name in axes else leaf for name, leaf in layer.items()}


def _write(cache: LayerCache, key: jax.Array, value: jax.Array, index: jax.Array) -> LayerCache:
    """Writes one token's key and value [B, 1, K, H] at `index` of every row."""
    update, (key, value) = jax.lax.dynamic_update_slice_in_dim, _cached(key, value)
    return dataclasses.replace(
        cache, key=update(cache.key, key, index, axis=3), value=update(cache.value, value, index, axis=2)
    )


def _cached(key: jax.Array, value: jax.Array) -> KeyValue:
    """Keys and values [B, T, K, H] as a cache holds them: [B, K, H, T] and [B, K, T, H]."""
    return jnp.moveaxis(key, 1, 3), value.swapaxes(1, 2)


def shift_left(x: jax.Array, columns: jax.Array, *, most: int) -> jax.Array:
    """Row b of [B, T, ...] moved to the left by columns[b], 0..most; what leaves a row wraps around to its right.

    By one power of two at a time: on a TPU a gather is slow, its gradient is slower, and both take long to compile.
    """
    for bit in range(most.bit_length()):
        moves = (columns >> bit & 1).astype(bool).reshape(-1, *[1] * (x.ndim - 1))
        x = jnp.where(moves, jnp.roll(x, -(1 << bit), axis=1), x)
    return x


def embed(params: Params, tokens: jax.Array) -> jax.Array:
    """Token embeddings [B, T, D] float32."""
    table, dtype = params["embedding"], product_dtype(params)
    found = lookup(table, tokens).astype(jnp.float32)
    if table.dtype == dtype:
        return found
    # unlike two casts, no compiler removes this
    return jax.lax.reduce_precision(found, jnp.finfo(dtype).nexp, jnp.finfo(dtype).nmant)
