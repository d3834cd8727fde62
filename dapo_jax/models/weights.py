"""Device: the one table of a model's weights; initialisation, sharding, import and export derive from it."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import traverse_util
from jax.sharding import Mesh

from dapo_jax.models.architecture import Architecture
from dapo_jax.parallel.sharding import TRAIN_RULES, Rules, weight_sharding


@dataclass(frozen=True)
class Weight:
    """One leaf of the parameter pytree.

    `shape` and `axes` (logical names, see parallel/sharding.py) are those of the leaf; a leaf under "layers"
    has the layer as its first dimension. `hf_name` is the Hugging Face tensor, one per layer if it contains
    {layer}, of shape `hf_shape`; `transposed` says that it is stored as [outputs, inputs].
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    initializer: str  # normal | ones | zeros
    hf_name: str
    hf_shape: tuple[int, ...]
    transposed: bool = False

    @property
    def stacked(self) -> bool:
        return self.path[0] == "layers"

    @property
    def is_matrix(self) -> bool:
        """True for the operands of matrix products, which may be kept in bfloat16."""
        return self.initializer == "normal"

    @property
    def of_tokens(self) -> bool:
        """True for the two tables with a row for each token."""
        return "vocab" in self.axes


def weight_table(arch: Architecture) -> list[Weight]:
    """All weights of `arch`, in the order of the forward pass."""
    V, D, F = arch.vocab_size, arch.hidden_size, arch.intermediate_size
    N, K, H = arch.num_heads, arch.num_kv_heads, arch.head_dim

    def norm(name, size, hf_name):
        return _layer(arch, name, (size,), ("norm",), hf_name, (size,), initializer="ones")

    def projection(name, shape, axes, hf_name, inputs):
        outputs = math.prod(shape) // inputs
        return _layer(arch, name, shape, axes, hf_name, (outputs, inputs), transposed=True)

    table = [
        Weight(("embedding",), (V, D), ("vocab", "embed"), "normal", "model.embed_tokens.weight", (V, D)),
        norm("attention_norm", D, "input_layernorm.weight"),
        projection("query", (D, N, H), ("embed", "heads", "head_dim"), "self_attn.q_proj.weight", D),
        projection("key", (D, K, H), ("embed", "kv_heads", "head_dim"), "self_attn.k_proj.weight", D),
        projection("value", (D, K, H), ("embed", "kv_heads", "head_dim"), "self_attn.v_proj.weight", D),
    ]
    if arch.qkv_bias:
        for name, heads, axis in (("query", N, "heads"), ("key", K, "kv_heads"), ("value", K, "kv_heads")):
            hf_name = f"self_attn.{name[0]}_proj.bias"
            shape, axes = (heads, H), (axis, "head_dim")
            table.append(_layer(arch, f"{name}_bias", shape, axes, hf_name, (heads * H,), "zeros"))
    if arch.qk_norm:
        table += [
            norm("query_norm", H, "self_attn.q_norm.weight"),
            norm("key_norm", H, "self_attn.k_norm.weight"),
        ]
    table += [
        projection("output", (N, H, D), ("heads", "head_dim", "embed"), "self_attn.o_proj.weight", N * H),
        norm("mlp_norm", D, "post_attention_layernorm.weight"),
        projection("gate", (D, F), ("embed", "mlp"), "mlp.gate_proj.weight", D),
        projection("up", (D, F), ("embed", "mlp"), "mlp.up_proj.weight", D),
        projection("down", (F, D), ("mlp", "embed"), "mlp.down_proj.weight", F),
        Weight(("final_norm",), (D,), ("norm",), "ones", "model.norm.weight", (D,)),
    ]
    if arch.scalar_head:
        table.append(Weight(("score",), (D,), ("embed",), "zeros", "score.weight", (1, D)))
    elif not arch.tie_embeddings:
        table.append(Weight(("head",), (V, D), ("vocab", "embed"), "normal", "lm_head.weight", (V, D)))
    return table


def _layer(arch, name, shape, axes, hf_name, hf_shape, initializer="normal", transposed=False) -> Weight:
    return Weight(
        ("layers", name),
        (arch.num_layers, *shape),
        ("layers", *axes),
        initializer,
        "model.layers.{layer}." + hf_name,
        hf_shape,
        transposed,
    )


def init_params(arch: Architecture, seed: int) -> dict[str, Any]:
    """Fresh float32 parameters: matrices normal(0, initializer_range), norms one, biases zero."""

    def leaf(index: int, weight: Weight) -> jax.Array:
        if weight.initializer == "normal":
            key = jax.random.fold_in(jax.random.key(seed), index)
            return arch.initializer_range * jax.random.normal(key, weight.shape, jnp.float32)
        return jnp.ones(weight.shape) if weight.initializer == "ones" else jnp.zeros(weight.shape)

    table = weight_table(arch)
    return unflatten((weight, leaf(index, weight)) for index, weight in enumerate(table))


def unflatten(leaves: Iterable[tuple[Weight, Any]]) -> dict[str, Any]:
    """A nested dict with the parameters' structure from (weight, leaf) pairs."""
    return traverse_util.unflatten_dict({weight.path: leaf for weight, leaf in leaves})


def weight_shardings(table: Sequence[Weight], mesh: Mesh, rules: Rules) -> dict[str, Any]:
    """The sharding of each weight of `table` under `rules`, with the parameters' structure."""
    return unflatten((weight, weight_sharding(weight, mesh, rules)) for weight in table)


def cast_matrices(params: dict[str, Any], arch: Architecture, dtype: Any, *, tables: bool = True) -> dict[str, Any]:
    """`params` with the operands of matrix products in `dtype`; norms and biases stay float32.

    Args:
        tables: whether to cast the two tables of tokens too; else they are rounded where they are used.
    """
    flat: Any = traverse_util.flatten_dict(params)

    def cast(weight: Weight) -> Any:
        leaf = flat[weight.path]
        return leaf.astype(dtype) if weight.is_matrix and (tables or not weight.of_tokens) else leaf

    return unflatten((weight, cast(weight)) for weight in weight_table(arch))


def build_freeze(arch: Architecture, dtype: Any, mesh: Mesh) -> Callable[[Any], Any]:
    """A function that turns whole parameters (donated) into weights in the dtype of matrix products."""
    shardings = weight_shardings(weight_table(arch), mesh, TRAIN_RULES)
    return jax.jit(lambda params: cast_matrices(params, arch, dtype), out_shardings=shardings, donate_argnums=0)


def count_params(arch: Architecture) -> int:
    """Number of scalar parameters."""
    return sum(math.prod(weight.shape) for weight in weight_table(arch))
