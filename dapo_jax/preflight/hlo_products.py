"""Host: FLOPs of matrix products in a compiled program: XLA's own, and those inside known kernels."""

import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dapo_jax.preflight.hlo_text import Instruction, Shape

SPLASH = re.compile(r"splash_mha_(fwd|dq|dkv)")
PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4}  # of [T, H] and [H, T], or [T, T] and [T, H]
TREE = re.compile(r"tree_attention_(fwd|dq|dkv)")
CUDNN = re.compile(r"__cudnn\$fmha\w*?(Backward)?$")
CUDNN_PRODUCTS = {None: 2, "Backward": 5}
PAGED = re.compile(r"paged_attention(|_of_runs|_and_runs)/pallas_call")
BLOCK_SUMS, CHOSEN, STATES = "block_sums/pallas_call", "chosen_block/pallas_call", "update_states/pallas_call"
GROUPED = re.compile(r"grouped_(outer_)?products\b")
FLOATS = ("bf16", "f16", "f32")


@dataclass(frozen=True)
class PagedKeys:
    """Keys in pages that the rows of a device see at a token."""

    own: float  # in the mean layer, those that no run reads
    prompts: float  # in a layer without a window, those that runs read, for each row; they are ...
    read: float  # ... so many, if each run reads them once


Pairs = float | PagedKeys | None  # see `Program.pairs`


def product_flops(instruction: Instruction, operands: Sequence[Shape], pairs: Pairs = None) -> float | None:
    """FLOPs of a dot, a convolution or a custom call; None for an unknown kernel that contains products.

    Args:
        pairs: see `Program.pairs`.
    """
    if instruction.op == "custom-call":
        return _kernel_flops(instruction, operands, pairs)
    left, right = operands[:2]
    output = instruction.shapes[0]
    if instruction.op == "convolution":
        return 2.0 * _convolution(left, right, output, instruction.attributes)
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
    sizes = [left.sizes[int(i)] for i in contracted[1].split(",") if i] if contracted else []
    return 2.0 * math.prod(output.sizes) * math.prod(sizes)


def _kernel_flops(instruction: Instruction, operands: Sequence[Shape], pairs: Pairs) -> float | None:
    estimate = re.search(r'"cost_estimate":\s*\{[^}]*"flops":\s*"?(\d+)', instruction.attributes)
    if estimate:
        return float(estimate[1])
    if isinstance(pairs, PagedKeys) and (paged := PAGED.search(instruction.attributes)):
        query, _, rows = _query_and_pages(instruction, operands)
        return PRODUCTS["fwd"] * 2.0 * _paged_keys(paged[1], pairs)[0] * math.prod(query.sizes) / rows
    pairs = None if isinstance(pairs, PagedKeys) else pairs
    if STATES in instruction.attributes:
        return 0.0  # its sums are not products of matrices
    if BLOCK_SUMS in instruction.attributes:
        table, hidden = (shape for shape in operands if len(shape.sizes) == 2)
        return 2.0 * math.prod(table.sizes) * hidden.sizes[0]
    if CHOSEN in instruction.attributes:
        return 2.0 * math.prod(instruction.shapes[0].sizes) * operands[0].sizes[1]
    if "triton" in instruction.target and GROUPED.search(instruction.attributes):
        rows, inner = operands[0].sizes
        return 2.0 * rows * inner * instruction.shapes[0].sizes[-1]
    if splash := SPLASH.match(instruction.name):
        query = next(shape for shape in operands if len(shape.sizes) >= 3 and shape.kind in FLOATS)
        return _attention(PRODUCTS[splash[1]], query, pairs)
    if "triton" in instruction.target and (tree := TREE.search(instruction.attributes)):
        bins, length, heads, size = operands[0].sizes
        return _attention(PRODUCTS[tree[1]], replace(operands[0], sizes=(bins, heads, length, size)), pairs)
    if cudnn := CUDNN.match(instruction.target):
        return _attention(CUDNN_PRODUCTS[cudnn[1]], instruction.shapes[0], pairs)
    if "__cublas$" in instruction.target:
        return _cublas(operands[0], instruction)
    return None if re.search("tpu_custom_call|gemm|cudnn", instruction.target) else 0.0


def unread_bytes(instruction: Instruction, operands: Sequence[Shape], pairs: Pairs) -> float:
    """Bytes that a kernel does not move of pages and tail, states, or the head's table; 0 of other instructions.

    Negative if rows read more blocks than the table has. Of a tail of C tokens, a GPU's kernel reads those up to the
    newest: from 1 to C.
    """
    if STATES in instruction.attributes:
        places, pool = operands[0], next(shape for shape in operands if len(shape.sizes) == 4)
        return 2 * pool.bytes * max(1 - places.sizes[0] / pool.sizes[0], 0.0)
    if CHOSEN in instruction.attributes:
        table = operands[0]
        return table.bytes * (1 - math.prod(instruction.shapes[0].sizes) / table.sizes[0])
    if not isinstance(pairs, PagedKeys) or not (paged := PAGED.search(instruction.attributes)):
        return 0.0
    query, pages, _ = _query_and_pages(instruction, operands)
    _, read = _paged_keys(paged[1], pairs)
    tails = [shape for shape in operands if len(shape.sizes) == 4 and shape not in (query, pages)]
    unread = sum(tail.bytes * (1 - 1 / tail.sizes[2]) / 2 for tail in tails if "triton" in instruction.target)
    return unread + pages.bytes * (1 - read / (pages.sizes[0] * pages.sizes[2]))


def _paged_keys(name: str, keys: PagedKeys) -> tuple[float, float]:
    """The keys that a kernel of paged attention scores, and that it reads."""
    return {
        "": (keys.own, keys.own),
        "_of_runs": (keys.prompts, keys.read),
        "_and_runs": (keys.own + keys.prompts, keys.own + keys.read),
    }[name]


def _query_and_pages(instruction: Instruction, operands: Sequence[Shape]) -> tuple[Shape, Shape, int]:
    """Operands of paged attention, and the rows: [B, K, G, H] or with Triton [K, B * G, H], and [A, K, C, 2H]."""
    table, by_head, by_row = ([shape for shape in operands if len(shape.sizes) == axes] for axes in (2, 3, 4))
    if "triton" in instruction.target:
        return by_head[0], by_row[0], table[0].sizes[0]
    return by_row[0], by_row[1], by_row[0].sizes[0]


def _attention(products: int, query: Shape, pairs: float | None) -> float:
    """FLOPs of a kernel's `products` of queries with keys, or of scores with values.

    Args:
        query: [..., T, H], or what is like it, with the bins and heads of a device before.
        pairs: scores of a bin and head that are computed; None: those on and below the diagonal.
    """
    *batch, length, size = query.sizes
    return products * 2.0 * math.prod(batch) * size * (length * (length + 1) / 2 if pairs is None else pairs)


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
