"""Device: low-rank adapters (LoRA, arXiv:2106.09685): W acts as W + alpha / rank * A B, and only A and B are trained.

Sizes: L layers, r rank. A and B are leaves next to their matrix: `query_lora_a` [L, D, r], `query_lora_b` [L, r, N, H].
"""

import string
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dapo_jax.models.architecture import Architecture
from dapo_jax.models.attention import matmul
from dapo_jax.models.weights import Weight, unflatten, weight_table

# Hugging Face's name of a projection -> ours
TARGETS = {
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "o_proj": "output",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "in_proj_qkv": "delta_mixed",
    "in_proj_z": "delta_gate",
    "in_proj_b": "delta_beta",
    "in_proj_a": "delta_decay",
    "out_proj": "delta_output",
}
SHARED = "shared_"  # begins our names of the projections of a network that all tokens share, next to experts
ALL_LINEAR = "all-linear"  # every matrix of TARGETS that the model has
A, B = "_lora_a", "_lora_b"


@dataclass(frozen=True)
class Lora:
    """Which matrices have adapters, and of what size."""

    rank: int
    alpha: float
    targets: tuple[str, ...]  # names of TARGETS

    @property
    def scale(self) -> float:
        """The factor of A B."""
        return self.alpha / self.rank


def present_targets(arch: Architecture) -> tuple[str, ...]:
    """The names of TARGETS that some layer has: a model whose feed-forward networks are all experts has four."""
    return tuple(
        target for target, name in TARGETS.items() if arch.layers_with(name) or arch.layers_with(SHARED + name)
    )


def adapter_table(arch: Architecture, lora: Lora) -> list[Weight]:
    """The adapters' weights, under PEFT's names; nothing else is trained."""
    return [adapter for weight in _targets(arch, lora) for adapter in _adapters(weight, lora.rank)]


def _targets(arch: Architecture, lora: Lora) -> Iterator[Weight]:
    names = {TARGETS[target] for target in lora.targets}
    table = (weight for weight in weight_table(arch) if weight.stacked)
    return (weight for weight in table if weight.path[1].removeprefix(SHARED) in names)


def _adapters(weight: Weight, rank: int) -> tuple[Weight, Weight]:
    assert weight.matrix_axes is not None
    (layers, *shape), (_, *axes), split = weight.shape, weight.axes, len(weight.matrix_axes[0])
    outputs, inputs = weight.hf_shape
    stem = "base_model.model." + weight.hf_name.removesuffix(".weight")
    first = Weight(
        ("layers", weight.path[1] + A),
        (layers, *shape[:split], rank),
        ("layers", *axes[:split], "rank"),
        "normal",
        stem + ".lora_A.weight",
        (rank, inputs),
        transposed=True,
        layers=weight.layers,
    )
    second = Weight(
        ("layers", weight.path[1] + B),
        (layers, rank, *shape[split:]),
        ("layers", "rank", *axes[split:]),
        "zeros",
        stem + ".lora_B.weight",
        (outputs, rank),
        transposed=True,
        layers=weight.layers,
    )
    return first, second


def init_adapters(arch: Architecture, lora: Lora, seed: int) -> dict[str, Any]:
    """Fresh float32 adapters: A uniform in ±1 / sqrt(inputs), as in PEFT, B zero, so that nothing changes yet."""

    def leaf(index: int, weight: Weight) -> jax.Array:
        if weight.initializer == "zeros":
            return jnp.zeros(weight.shape)
        bound = weight.hf_shape[1] ** -0.5
        key = jax.random.fold_in(jax.random.key(seed), index)
        return jax.random.uniform(key, weight.shape, jnp.float32, -bound, bound)

    return unflatten((weight, leaf(index, weight)) for index, weight in enumerate(adapter_table(arch, lora)))


def with_adapters(base: dict[str, Any], adapters: dict[str, Any], lora: Lora, dtype: Any) -> dict[str, Any]:
    """`base` with the adapters next to their matrices, scaled and in the dtype of products, as `adapted` takes them."""
    layers = {
        name: (leaf * lora.scale if name.endswith(B) else leaf).astype(dtype)
        for name, leaf in adapters.get("layers", {}).items()
    }
    return {**base, "layers": {**base["layers"], **layers}}


def writes_narrow() -> bool:
    """Inside jit: whether a layer's matrices write their products in their own dtype, half the bytes: on GPUs.

    On CPUs XLA widens the products again, and drops their rounding in one program and keeps it in another, so that
    sampling and training differ; on TPUs, where they are fused with what follows, there is little to save. Where
    "tensor" divides the matrices, devices add up some products and some cotangents, which must be float32.
    """
    mesh = jax.sharding.get_abstract_mesh()
    device = mesh.abstract_device
    return device is not None and device.platform == "gpu" and mesh.shape["tensor"] == 1


def adapted(subscripts: str, x: jax.Array, layer: dict[str, Any], name: str) -> jax.Array:
    """The product of `x` with matrix `name` of a layer, and with its adapter if it has one; float32.

    The product with the matrix may have been written narrow, those with the adapter, which is small, are float32.
    """
    result = matmul(subscripts, x, layer[name], narrow=writes_narrow())
    result = checkpoint_name(result, f"{name} product").astype(jnp.float32)
    if name + A not in layer:
        return result
    inputs, output = subscripts.split("->")
    of_x, of_weight = inputs.split(",")
    contracted = "".join(letter for letter in of_weight if letter in of_x)
    free = "".join(letter for letter in of_weight if letter not in of_x)
    narrow = "".join(letter for letter in of_x if letter not in contracted) + "r"
    inner = matmul(f"{of_x},{contracted}r->{narrow}", x, layer[name + A])
    return result + matmul(f"{narrow},r{free}->{output}", inner, layer[name + B])


def merged(base: dict[str, Any], adapters: dict[str, Any], lora: Lora) -> dict[str, Any]:
    """`base` with scale * A B added to each target, in float32 and then in the base's dtype, without adapters."""
    layers = dict(base["layers"])
    names = [prefix + TARGETS[target] for target in lora.targets for prefix in ("", SHARED)]
    for name in (name for name in names if name + A in adapters["layers"]):
        a, b = adapters["layers"][name + A], adapters["layers"][name + B]
        inputs, outputs = string.ascii_lowercase[: a.ndim - 2], string.ascii_uppercase[: b.ndim - 2]
        change = jnp.einsum(f"z{inputs}y,zy{outputs}->z{inputs}{outputs}", a, b, precision="highest") * lora.scale
        layers[name] = (layers[name].astype(jnp.float32) + change).astype(layers[name].dtype)
    return {**base, "layers": layers}


def peft_config(lora: Lora, base_path: str) -> dict[str, Any]:
    """adapter_config.json of PEFT."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_path,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(lora.targets),
        "inference_mode": True,
    }
