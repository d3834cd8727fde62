"""Device: the one table of a model's weights; initialisation, sharding, import and export derive from it."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.sharding import Mesh

from dapo_jax.models.architecture import Architecture, Delta, Experts
from dapo_jax.parallel.sharding import TRAIN_RULES, Rules, weight_sharding

UNTRAINED = ("router_bias",)  # leaves that no update changes


@dataclass(frozen=True)
class Weight:
    """One leaf of the parameter pytree.

    `shape` and `axes` (logical names, see parallel/sharding.py) are those of the leaf; a leaf under "layers"
    has the layer, of those in `layers`, as its first dimension, and one of experts the expert as its second. `hf_name`
    is the Hugging Face tensor of shape `hf_shape`, one per layer if it contains {layer}, and one per expert if it
    contains {expert}; `transposed` says that it is stored as [outputs, inputs].
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    initializer: str  # normal | ones | zeros
    hf_name: str
    hf_shape: tuple[int, ...]
    transposed: bool = False
    layers: tuple[int, ...] = ()  # numbers of those that have it; empty: all
    turns: tuple[int, int] = (0, 0)  # (i, n): a tensor holds all experts, and of its last dimension each n-th from i on

    @property
    def tensors(self) -> list[str]:
        """The names of the Hugging Face tensors that make up the leaf, in its order."""
        layers = (self.layers or range(self.shape[0])) if self.stacked else (0,)
        experts = range(1 if self.turns[1] else self.num_experts or 1)
        return [self.hf_name.format(layer=layer, expert=expert) for layer in layers for expert in experts]

    @property
    def file_shape(self) -> tuple[int, ...]:
        """The shape of such a tensor."""
        if not self.turns[1]:
            return self.hf_shape
        *others, last = self.shape[1:]
        return *others, last * self.turns[1]

    def kept(self, tensor: np.ndarray) -> np.ndarray:
        """What the leaf has of such a tensor."""
        first, every = self.turns
        return tensor[..., first::every] if every else tensor.T if self.transposed else tensor

    @property
    def stacked(self) -> bool:
        return self.path[0] == "layers"

    @property
    def is_matrix(self) -> bool:
        """True for the operands of matrix products that may be kept in bfloat16: all but routers'."""
        return self.initializer == "normal" and self.path[-1] not in ("router", "delta_filter")

    def stored_dtype(self, dtype: Any) -> np.dtype:
        """Of its tensors in a file of this dtype: what is added to scores stays float32, so that choices stay."""
        return np.dtype(np.float32 if self.path[-1] in UNTRAINED else dtype)

    @property
    def num_experts(self) -> int:
        """E of a leaf with the weights of all experts, else 0."""
        return self.shape[1] if "expert" in self.axes else 0

    @property
    def matrix_axes(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """A layer's matrix: its dimensions that are inputs, and those that are outputs. None: it is no such matrix."""
        if not self.stacked or len(self.hf_shape) != 2:
            return None
        first, inputs = (2 if self.num_experts else 1), self.hf_shape[1]
        split = next(i for i in range(first + 1, len(self.shape)) if math.prod(self.shape[first:i]) == inputs)
        return tuple(range(first, split)), tuple(range(split, len(self.shape)))

    @property
    def of_tokens(self) -> bool:
        """True for the two tables with a row for each token."""
        return "vocab" in self.axes


def weight_table(arch: Architecture) -> list[Weight]:
    """All weights of `arch`, in the order of the forward pass."""
    V, D = arch.vocab_size, arch.hidden_size
    table = [Weight(("embedding",), (V, D), ("vocab", "embed"), "normal", "model.embed_tokens.weight", (V, D))]
    table += _attention(arch)
    if arch.layers_with("gate"):
        table += _feed_forward(arch, arch.intermediate_size)
    if arch.experts is not None:
        table += _experts(arch, arch.experts)
        if size := arch.experts.shared_size:
            gated = arch.experts.shared_gated
            table += _feed_forward(arch, size, "shared_", f"mlp.shared_expert{'' if gated else 's'}.")
            if gated:
                axes = "embed", "router"
                table.append(_projection(arch, "shared_score", (D, 1), axes, "mlp.shared_expert_gate.weight", D))
    if arch.norms != "before":
        table.append(_norm(arch, "mlp_out_norm", "post_feedforward_layernorm.weight"))
    table.append(Weight(("final_norm",), (D,), ("norm",), _unit(arch), "model.norm.weight", (D,)))
    if arch.scalar_head:
        table.append(Weight(("score",), (D,), ("embed",), "zeros", "score.weight", (1, D)))
    elif not arch.tie_embeddings:
        table.append(Weight(("head",), (V, D), ("vocab", "embed"), "normal", "lm_head.weight", (V, D)))
    return table


def _attention(arch: Architecture) -> list[Weight]:
    D, N, K, H = arch.hidden_size, arch.num_heads, arch.num_kv_heads, arch.head_dim
    heads = {"query": (N, "heads"), "key": (K, "kv_heads"), "value": (K, "kv_heads")}
    sizes = {**dict.fromkeys(heads, H), "query": 2 * H if arch.gated_attention else H}
    table = [] if arch.norms == "after" else [_norm(arch, "attention_norm", "input_layernorm.weight")]
    table += [] if arch.delta is None else _delta(arch, arch.delta)
    for name, (count, axis) in heads.items():
        axes, shape = ("embed", axis, "head_dim"), (D, count, sizes[name])
        table.append(_projection(arch, name, shape, axes, f"self_attn.{name[0]}_proj.weight", D))
    for name, (count, axis) in heads.items() if arch.qkv_bias else ():
        hf_name = f"self_attn.{name[0]}_proj.bias"
        shape = count, sizes[name]
        table.append(_layer(arch, f"{name}_bias", shape, (axis, "head_dim"), hf_name, (math.prod(shape),), "zeros"))
    for name, (count, axis) in list(heads.items())[:2] if arch.qk_norm else ():
        whole = arch.qk_norm == "projection"
        shape, axes = ((count, H), (axis, "head_dim")) if whole else ((H,), ("norm",))
        hf_name, hf_shape = f"self_attn.{name[0]}_norm.weight", (math.prod(shape),)
        table.append(_layer(arch, f"{name}_norm", shape, axes, hf_name, hf_shape, _unit(arch)))
    if arch.sinks:
        table.append(_layer(arch, "sink", (N,), ("heads",), "self_attn.sinks", (N,), "zeros"))
    axes = "heads", "head_dim", "embed"
    table.append(_projection(arch, "output", (N, H, D), axes, "self_attn.o_proj.weight", N * H))
    if arch.output_bias:
        table.append(_layer(arch, "output_bias", (D,), ("norm",), "self_attn.o_proj.bias", (D,), "zeros"))
    if arch.norms == "before":
        table.append(_norm(arch, "mlp_norm", "post_attention_layernorm.weight"))
    else:
        table.append(_norm(arch, "attention_out_norm", "post_attention_layernorm.weight"))
    if arch.norms == "around":
        table.append(_norm(arch, "mlp_norm", "pre_feedforward_layernorm.weight"))
    return table


def _delta(arch: Architecture, delta: Delta) -> list[Weight]:
    D, V, J, M, W = arch.hidden_size, delta.value_heads, delta.value_dim, delta.channels, delta.filter_width
    heads = "embed", "heads"
    return [
        _projection(arch, "delta_mixed", (D, M), ("embed", "channels"), "linear_attn.in_proj_qkv.weight", D),
        _layer(arch, "delta_filter", (M, W), ("channels", "norm"), "linear_attn.conv1d.weight", (M, 1, W)),
        _projection(arch, "delta_gate", (D, V, J), (*heads, "head_dim"), "linear_attn.in_proj_z.weight", D),
        _projection(arch, "delta_beta", (D, V), heads, "linear_attn.in_proj_b.weight", D),
        _projection(arch, "delta_decay", (D, V), heads, "linear_attn.in_proj_a.weight", D),
        _layer(arch, "delta_decay_bias", (V,), ("heads",), "linear_attn.dt_bias", (V,), "ones"),
        _layer(arch, "delta_rate", (V,), ("heads",), "linear_attn.A_log", (V,), "zeros"),
        _layer(arch, "delta_norm", (J,), ("norm",), "linear_attn.norm.weight", (J,), "ones"),
        _projection(
            arch, "delta_output", (V, J, D), ("heads", "head_dim", "embed"), "linear_attn.out_proj.weight", V * J
        ),
    ]


def _feed_forward(arch: Architecture, F: int, prefix: str = "", hf_prefix: str = "mlp.") -> list[Weight]:
    D = arch.hidden_size
    shapes = {"gate": ("embed", "mlp"), "up": ("embed", "mlp"), "down": ("mlp", "embed")}
    sizes, table = {"embed": D, "mlp": F}, []
    for name, (inputs, outputs) in shapes.items():
        shape, hf_name = (sizes[inputs], sizes[outputs]), f"{hf_prefix}{name}_proj"
        table.append(_projection(arch, prefix + name, shape, (inputs, outputs), f"{hf_name}.weight", shape[0]))
        if arch.mlp_bias:
            axes = ("mlp",) if outputs == "mlp" else ("norm",)
            table.append(_layer(arch, f"{prefix}{name}_bias", shape[1:], axes, f"{hf_name}.bias", shape[1:], "zeros"))
    return table


def _experts(arch: Architecture, experts: Experts) -> list[Weight]:
    D, E, F = arch.hidden_size, experts.number, experts.intermediate_size
    router = "mlp.router" if experts.biases else "mlp.gate"
    table = [_projection(arch, "router", (D, E), ("embed", "router"), f"{router}.weight", D)]
    if experts.biases:
        table.append(_layer(arch, "router_logit_bias", (E,), ("router",), f"{router}.bias", (E,), "zeros"))
    if experts.biased:
        hf_name = "mlp.gate.e_score_correction_bias"
        table.append(_layer(arch, "router_bias", (E,), ("router",), hf_name, (E,), "zeros"))
    matrices = []
    for name, inputs, outputs in (("gate", D, F), ("up", D, F), ("down", F, D)):
        axes = ("expert", "expert_embed", "expert_mlp") if name != "down" else ("expert", "expert_mlp", "expert_embed")
        hf_name = f"mlp.experts.{{expert}}.{name}_proj.weight"
        shape, hf_shape = (E, inputs, outputs), (outputs, inputs)
        matrices.append(_layer(arch, f"expert_{name}", shape, axes, hf_name, hf_shape, transposed=True))
    return table + (_joined(arch, matrices) if experts.biases else matrices)


def _joined(arch: Architecture, matrices: list[Weight]) -> list[Weight]:
    """The matrices of experts and their biases as gpt-oss stores them: gate and up take turns in one tensor."""
    joined, biases = [], []
    for weight, turns, name in zip(matrices, ((0, 2), (1, 2), (0, 1)), ("gate_up", "gate_up", "down"), strict=True):
        hf_name, (_, number, _, outputs), (_, axis, _, last) = f"mlp.experts.{name}_proj", weight.shape, weight.axes
        joined.append(replace(weight, hf_name=f"model.layers.{{layer}}.{hf_name}", turns=turns))
        shape, axes = (number, outputs), (axis, last if name == "gate_up" else "norm")
        bias = _layer(arch, f"{weight.path[-1]}_bias", shape, axes, f"{hf_name}_bias", (outputs,), "zeros")
        biases.append(replace(bias, turns=turns))
    return joined + biases


def _unit(arch: Architecture) -> str:
    """The initializer of norms that scale by 1."""
    return "zeros" if arch.norm_offset else "ones"


def _norm(arch: Architecture, name: str, hf_name: str) -> Weight:
    size = (arch.hidden_size,)
    return _layer(arch, name, size, ("norm",), hf_name, size, _unit(arch))


def _projection(arch, name, shape, axes, hf_name, inputs) -> Weight:
    return _layer(arch, name, shape, axes, hf_name, (math.prod(shape) // inputs, inputs), transposed=True)


def _layer(arch, name, shape, axes, hf_name, hf_shape, initializer="normal", transposed=False) -> Weight:
    layers = arch.layers_with(name)
    return Weight(
        ("layers", name),
        (len(layers), *shape),
        ("layers", *axes),
        initializer,
        "model.layers.{layer}." + hf_name,
        hf_shape,
        transposed,
        layers,
    )


def init_params(arch: Architecture, seed: int) -> dict[str, Any]:
    """Fresh float32 parameters: matrices normal(0, initializer_range), norms without effect, biases zero."""

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
