"""Host: parameters from the tensors of a model file, checked by name and shape, one leaf at a time."""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dapo_jax.errors import InputError
from dapo_jax.models.architecture import Architecture
from dapo_jax.models.weights import Weight, unflatten, weight_table

Place = Callable[[Weight, np.ndarray], jax.Array]
Shape = tuple[int, ...]
MAX_PROBLEMS = 10


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: its shape, and a function that reads it in any floating-point dtype."""

    shape: Shape
    read: Callable[[], np.ndarray]


def assemble(
    source: Path,
    arch: Architecture,
    tensors: Mapping[str, StoredTensor],
    template: Callable[[Weight], str],
    place: Place,
    *,
    unused: Mapping[str, Shape] | None = None,
    problems: Sequence[str] = (),
) -> dict[str, Any]:
    """The parameters of `arch` in float32, from the tensors of `source`.

    The host holds one leaf (of stacked weights: all layers of one projection) and one tensor at a time.

    Args:
        template: the tensor name of a weight, with {layer} in it if there is one tensor per layer.
        place: puts one whole leaf on the devices.
        unused: name and expected shape of tensors that the file may hold and that are not read.
        problems: what the caller has found wrong with the tensors.

    Raises:
        ValueError: `problems`, and each missing, unknown or misshapen tensor, up to ten together; or a tensor with a
            value that is not finite.
    """
    names = {weight: tensor_names(weight, template(weight)) for weight in weight_table(arch)}
    expected = {name: _stored_shape(weight, template(weight)) for weight in names for name in names[weight]}
    found = [*problems, *_mismatches(tensors, expected, unused or {})]
    if found:
        more = [f"and {len(found) - MAX_PROBLEMS} more"] if len(found) > MAX_PROBLEMS else []
        raise InputError(
            f"{source} must hold the weights of the model that it describes (take both from one download): "
            + "; ".join(found[:MAX_PROBLEMS] + more)
        )

    def leaves() -> Iterator[tuple[Weight, jax.Array]]:
        for weight in names:
            stored = {name: tensors[name] for name in names[weight]}
            placed = jax.block_until_ready(place(weight, _read_leaf(source, weight, stored)))
            gc.collect(generation=0)  # only this makes JAX free its copy on the host
            yield weight, placed

    return unflatten(leaves())


def tensor_names(weight: Weight, template: str) -> list[str]:
    """The tensors that make up a leaf: one per layer if it is stacked, and one per expert if `template` says so."""
    layers = (weight.layers or range(weight.shape[0])) if weight.stacked else ("",)
    names = [template.replace("{layer}", str(layer)) for layer in layers]
    if "{expert}" not in template:
        return names
    return [name.replace("{expert}", str(expert)) for name in names for expert in range(weight.num_experts)]


def _stored_shape(weight: Weight, template: str) -> Shape:
    """The shape of each tensor of a leaf, which may hold all experts of a layer."""
    together = weight.num_experts and "{expert}" not in template
    return (weight.num_experts, *weight.hf_shape) if together else weight.hf_shape


def _mismatches(
    tensors: Mapping[str, StoredTensor], expected: Mapping[str, Shape], unused: Mapping[str, Shape]
) -> Iterator[str]:
    for name, shape in expected.items():
        if name not in tensors:
            yield f"tensor {name} of shape {shape} is missing"
    for name, tensor in tensors.items():
        shape = expected.get(name, unused.get(name))
        if shape is None:
            yield f"tensor {name} of shape {tensor.shape} is unknown"
        elif tensor.shape != shape:
            yield f"tensor {name} has shape {tensor.shape}, expected {shape}"


def _read_leaf(source: Path, weight: Weight, tensors: Mapping[str, StoredTensor]) -> np.ndarray:
    leaf = np.empty(weight.shape, np.float32)
    parts = leaf.reshape(len(tensors), -1)
    for part, (name, tensor) in zip(parts, tensors.items(), strict=True):
        if weight.transposed:
            outputs, inputs = weight.hf_shape
            part.reshape(-1, inputs, outputs)[...] = tensor.read().reshape(-1, outputs, inputs).swapaxes(1, 2)
        else:
            part.reshape(tensor.shape)[...] = tensor.read()
        if not np.isfinite(part).all():
            raise InputError(
                f"{source}: {np.count_nonzero(~np.isfinite(part))} of {part.size} values of tensor {name} are NaN or "
                "infinite: download the model again, or take an earlier checkpoint of the run that wrote it"
            )
    return leaf
