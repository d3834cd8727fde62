"""Host: FLOPs of matrix products in a compiled program: XLA's own, and those inside known kernels."""

import functools
import math
import re
from collections.abc import Sequence

from dapo_jax.preflight.hlo_text import Instruction, Shape

SPLASH = re.compile(r"splash_mha_(fwd|dq|dkv)")
SPLASH_PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4}  # of [T, H] and [H, T], or [T, T] and [T, H]
CUDNN = re.compile(r"__cudnn\$fmha\w*?(Backward)?$")
CUDNN_PRODUCTS = {None: 2, "Backward": 5}


def product_flops(instruction: Instruction, operands: Sequence[Shape]) -> float | None:
    """FLOPs of a dot, a convolution or a custom call; None for an unknown kernel that contains products."""
    if instruction.op == "custom-call":
        return _kernel_flops(instruction, operands)
    left, right = operands[:2]
    output = instruction.shapes[0]
    if instruction.op == "convolution":
        return 2.0 * _convolution(left, right, output, instruction.attributes)
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
    sizes = [left.sizes[int(i)] for i in contracted[1].split(",") if i] if contracted else []
    return 2.0 * math.prod(output.sizes) * math.prod(sizes)


def _kernel_flops(instruction: Instruction, operands: Sequence[Shape]) -> float | None:
    estimate = re.search(r'"cost_estimate":\s*\{[^}]*"flops":\s*"?(\d+)', instruction.attributes)
    if estimate:
        return float(estimate[1])
    if splash := SPLASH.match(instruction.name):
        return _splash(splash[1], operands)
    if cudnn := CUDNN.match(instruction.target):
        return _cudnn(cudnn[1], operands[0], instruction)
    if "__cublas$" in instruction.target:
        return _cublas(operands[0], instruction)
    return None if re.search("tpu_custom_call|gemm|cudnn", instruction.target) else 0.0


def _splash(part: str, operands: Sequence[Shape]) -> float:
    """FLOPs of JAX's splash attention with a causal mask, which skips the blocks above the diagonal."""
    blocks = next(shape.sizes[-1] for shape in operands if shape.kind == "s8")  # [.., query blocks, key blocks]
    query = max((shape.sizes for shape in operands if shape.kind in ("bf16", "f16")), key=math.prod)
    length = query[-2]
    return SPLASH_PRODUCTS[part] * 2.0 * math.prod(query) * length * (blocks + 1) / (2 * blocks)


def _cudnn(direction: str | None, query: Shape, instruction: Instruction) -> float:
    """FLOPs of cuDNN's attention, from the shape of the scores in its attributes; half with a causal mask."""
    scores = re.search(r'"intermediate_tensor_shape":.*?"dimensions":\s*\[([^\]]*)\]', instruction.attributes)
    assert scores is not None, instruction.attributes[:200]
    size = math.prod(int(part) for part in re.findall(r"\d+", scores[1])) * query.sizes[-1]
    causal = re.search(r'"mask_type":\s*"\w*CAUSAL', instruction.attributes)
    return CUDNN_PRODUCTS[direction] * 2.0 * size / (2 if causal else 1)


def _cublas(left: Shape, instruction: Instruction) -> float:
    """FLOPs of a product in cuBLAS or cuBLASLt."""
    contracted = re.search(r'"lhs_contracting_dimensions":\s*\[([^\]]*)\]', instruction.attributes)
    assert contracted is not None, instruction.attributes[:200]
    sizes = [left.sizes[int(place)] for place in re.findall(r"\d+", contracted[1])]
    return 2.0 * math.prod(instruction.shapes[0].sizes) * math.prod(sizes)


def _convolution(left: Shape, right: Shape, output: Shape, attributes: str) -> float:
    """Multiplications in a convolution, which is how TPUs express every matrix product."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", attributes)
    assert labels is not None, attributes
    of_left, of_right, of_output = labels[1], labels[2], labels[3]
    features = left.sizes[of_left.index("f")] * output.sizes[of_output.index("f")]
    for name in ("feature_group_count", "batch_group_count"):
        found = re.search(rf"{name}=(\d+)", attributes)
        features /= int(found[1]) if found else 1
    window = _window(attributes)
    total = float(features * left.sizes[of_left.index("b")])
    for place in range(len(of_output) - 2):
        label = str(place)
        total *= _valid_positions(
            left.sizes[of_left.index(label)],
            right.sizes[of_right.index(label)],
            output.sizes[of_output.index(label)],
            **{name: values[place] for name, values in window.items()},
        )
    return total


def _window(attributes: str) -> dict[str, list[int]]:
    """The stride, low padding and dilations of each spatial dimension."""
    text = re.search(r"window=\{([^}]*)\}", attributes)
    fields = dict(part.split("=") for part in text[1].split()) if text else {}
    rank = len(fields.get("size", "").split("x")) if "size" in fields else 0

    def numbers(name: str, default: int) -> list[int]:
        parts = fields[name].split("x") if name in fields else [str(default)] * rank
        return [int(part.split("_")[0]) for part in parts]

    return {
        "stride": numbers("stride", 1),
        "padding": numbers("pad", 0),
        "left_dilation": numbers("lhs_dilate", 1),
        "right_dilation": numbers("rhs_dilate", 1),
    }


@functools.cache
def _valid_positions(
    size: int, window: int, output: int, *, stride: int, padding: int, left_dilation: int, right_dilation: int
) -> int:
    """Pairs of output and window position that read an element, not padding or the gaps of a dilation."""
    if (stride, padding, left_dilation) == (1, 0, 1) and size == output + (window - 1) * right_dilation:
        return output * window
    reached = (left_dilation * (size - 1)) + 1
    return sum(
        0 <= place < reached and place % left_dilation == 0
        for first in range(-padding, -padding + window * right_dilation, right_dilation)
        for place in range(first, first + output * stride, stride)
    )
