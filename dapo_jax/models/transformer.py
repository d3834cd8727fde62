"""Device: the forward pass of Llama, Mistral, Qwen2 and Qwen3; one block serves training, prefill and decode.

Sizes: B rows, T tokens, D hidden, N query heads, K key-value heads, G = N // K, H head size, V vocabulary;
for decoding Q prompts with B // Q samples each, P prompt width, W width of the generated part.

Precision: operands of matrix products are in the dtype of the weight, everything else is float32.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.ad_checkpoint import checkpoint_name

from dapo_jax.models.architecture import Architecture
from dapo_jax.models.attention import attention, causal, matmul, shared_prompt_attention
from dapo_jax.models.lora import adapted
from dapo_jax.models.remat import rematerialized
from dapo_jax.models.weights import weight_table
from dapo_jax.parallel.sharding import constrain_residual, constrain_rows, gather_weight, lookup

Params = dict[str, Any]
KeyValue = tuple[jax.Array, jax.Array]
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
        """W, tokens of each row that there is room for."""
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
        params: weights; "layers" stacked in one pytree (scanned) or a list of pytrees (unrolled).
        tokens, positions: [B, T] int32.
        mask: [B, T] bool, True on real tokens; padding may stand anywhere.
        remat: what the backward pass finds kept, a name of models/remat.py's POLICIES.
    """
    hidden, _ = _run_layers(params, tokens, positions, mask, arch, remat=remat, keep_cache=False)
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

    def layer_step(hidden, layer):
        layer = _gathered(layer, arch)

        def attend_prompt(query, key, value):
            return attention(query, key, value, prompt_visible), _cached(key, value)

        prompt, shared = block(hidden[0], layer, prompt_rotation, attend_prompt, arch)

        def attend(query, key, value):
            key, value = _cached(key, value)
            return shared_prompt_attention(query, key, value, visible, shared[0], shared[1], prompt_mask), None

        response, _ = block(hidden[1], layer, rotation, attend, arch)
        return (constrain_residual(prompt), constrain_residual(response)), None

    layer_step = rematerialized(layer_step, remat)
    hidden = constrain_residual(embed(params, prompts)), constrain_residual(embed(params, responses[:, :length]))
    (prompt, response), _ = jax.lax.scan(layer_step, hidden, params["layers"])
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
    """What `forward_responses` returns, with rows laid out as kernels want them: prompt and response without a gap.

    Args:
        prompts, prompt_mask: [B, P], left-padded: one a row.
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

    def layer_step(x, layer):
        x, _ = block(x, _gathered(layer, arch), rotation, attend, arch)
        return constrain_residual(x), None

    x, _ = jax.lax.scan(rematerialized(layer_step, remat), constrain_residual(embed(params, tokens)), params["layers"])
    hidden = shift_left(x, jnp.maximum(prompt_lengths - 1, 0), most=width)[:, : responses.shape[1]]
    return rms_norm(hidden, params["final_norm"], arch.rms_norm_eps)


def prefill(params: Params, tokens: jax.Array, mask: jax.Array, arch: Architecture) -> tuple[jax.Array, list[KeyValue]]:
    """Last hidden state [Q, D] of left-padded prompts [Q, P]; each layer's keys and values as a LayerCache has them."""
    hidden, cache = _run_layers(params, tokens, positions_of(mask), mask, arch, remat="none", keep_cache=True)
    if not isinstance(cache, list):
        cache = [jax.tree.map(lambda x, i=i: x[i], cache) for i in range(arch.num_layers)]
    return hidden[:, -1], cache


def decode(
    params: Params,
    tokens: jax.Array,
    positions: jax.Array,
    prompt_mask: jax.Array,
    caches: list[LayerCache],
    index: jax.Array,
    arch: Architecture,
) -> tuple[jax.Array, list[LayerCache]]:
    """Hidden states [B, D] of one token a row, and the caches with that token written.

    Args:
        tokens, positions: [B] int32.
        prompt_mask: [Q, P] bool, True on real prompt tokens.
        index: scalar, how many tokens each row has sampled before this one.
    """
    x = embed(params, tokens[:, None])
    rotation = rotary(positions[:, None], arch)
    visible = (jnp.arange(caches[0].window) <= index)[None, None]
    new_caches = []
    for layer, cache in zip(params["layers"], caches, strict=True):

        def attend(query, key, value, cache=cache):
            cache = _write(cache, key, value, index)
            attended = shared_prompt_attention(
                query, cache.key, cache.value, visible, cache.prompt_key, cache.prompt_value, prompt_mask
            )
            return attended, cache

        x, cache = block(x, layer, rotation, attend, arch)
        new_caches.append(cache)
    return rms_norm(x, params["final_norm"], arch.rms_norm_eps)[:, 0], new_caches


def logits(params: Params, hidden: jax.Array) -> jax.Array:
    """Unnormalised float32 scores of the next token, [..., D] -> [..., V]."""
    table: Any = gather_weight(params["head"] if "head" in params else params["embedding"], ("vocab", "embed"))
    return matmul("...d,vd->...v", hidden, table.astype(product_dtype(params)))


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


def _run_layers(params, tokens, positions, mask, arch, *, remat, keep_cache) -> tuple[jax.Array, Any]:
    x = constrain_rows(embed(params, tokens))
    rotation = rotary(positions, arch)
    visible = causal(mask.shape[1], mask)

    def layer_step(x, layer):
        def attend(query, key, value):
            cache = _cached(key, value) if keep_cache else None
            return attention(query, key, value, visible), cache

        x, cache = block(x, layer, rotation, attend, arch)
        return constrain_rows(x), cache

    layer_step = rematerialized(layer_step, remat)
    if isinstance(params["layers"], list):
        cache = []
        for layer in params["layers"]:
            x, layer_cache = layer_step(x, layer)
            cache.append(layer_cache)
    else:
        x, cache = jax.lax.scan(layer_step, x, params["layers"])
    return rms_norm(x, params["final_norm"], arch.rms_norm_eps), cache


def _gathered(layer: Params, arch: Architecture) -> Params:
    """The weights of a layer whole over fsdp; adapters, which are small, as they lie."""
    axes = {weight.path[1]: weight.axes[1:] for weight in weight_table(arch) if weight.stacked}
    return {name: gather_weight(leaf, axes[name]) if name in axes else leaf for name, leaf in layer.items()}


def block(
    x: jax.Array,
    layer: Params,
    rotation: KeyValue,
    attend: Callable[..., tuple[jax.Array, Any]],
    arch: Architecture,
) -> tuple[jax.Array, Any]:
    """One transformer layer, [B, T, D] -> [B, T, D], and what `attend` returns beside its result."""
    normed = rms_norm(x, layer["attention_norm"], arch.rms_norm_eps)
    query = adapted("btd,dnh->btnh", normed, layer, "query")
    key = adapted("btd,dkh->btkh", normed, layer, "key")
    value = adapted("btd,dkh->btkh", normed, layer, "value")
    if arch.qkv_bias:
        query, key, value = query + layer["query_bias"], key + layer["key_bias"], value + layer["value_bias"]
    if arch.qk_norm:
        query = rms_norm(query, layer["query_norm"], arch.rms_norm_eps)
        key = rms_norm(key, layer["key_norm"], arch.rms_norm_eps)
    dtype = layer["query"].dtype
    query, key = rotate(query, rotation).astype(dtype), rotate(key, rotation).astype(dtype)
    query, key, value = map(checkpoint_name, (query, key, value.astype(dtype)), ("query", "key", "value"))
    attended, cache = attend(query, key, value)
    x = x + adapted("btnh,nhd->btd", attended, layer, "output")
    normed = rms_norm(x, layer["mlp_norm"], arch.rms_norm_eps)
    gate = jax.nn.silu(adapted("btd,df->btf", normed, layer, "gate"))
    up = adapted("btd,df->btf", normed, layer, "up")
    return x + adapted("btf,fd->btd", gate * up, layer, "down"), cache


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
    """Row b of [B, T, ...] moved to the left by columns[b], 0..most; what leaves a row comes back on its right.

    A power of two at a time: a TPU gathers slowly, adds up what was gathered more slowly, and takes long to compile it.
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
    # unlike two casts, this is never left out by a compiler
    return jax.lax.reduce_precision(found, jnp.finfo(dtype).nexp, jnp.finfo(dtype).nmant)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last dimension, in float32 (arXiv:1910.07467)."""
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps) * scale


def rotary(positions: jax.Array, arch: Architecture) -> KeyValue:
    """Cosine and sine [B, T, H // 2] float32 of the rotary embedding (arXiv:2104.09864)."""
    angles = positions[..., None].astype(jnp.float32) * rotary_frequencies(arch)
    return jnp.cos(angles), jnp.sin(angles)


def rotary_frequencies(arch: Architecture) -> np.ndarray:
    """Angular frequency of each pair of dimensions, [H // 2] float32, with Llama 3's scaling if it is set."""
    frequencies = arch.rope_theta ** -(np.arange(0, arch.head_dim, 2, dtype=np.float64) / arch.head_dim)
    scaling = arch.rope_scaling
    if scaling is not None:
        turns = scaling.original_max_position_embeddings * frequencies / (2 * np.pi)
        span = scaling.high_freq_factor - scaling.low_freq_factor
        smooth = np.clip((turns - scaling.low_freq_factor) / span, 0.0, 1.0)
        frequencies = frequencies * (smooth + (1 - smooth) / scaling.factor)
    return frequencies.astype(np.float32)


def rotate(x: jax.Array, rotation: KeyValue) -> jax.Array:
    """Applies the rotary embedding to [B, T, heads, H]; dimension i is paired with i + H // 2."""
    cosine, sine = (part[:, :, None] for part in rotation)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
