"""Host: what one device computes, moves and sends in a compiled program, read from the program's text.

XLA's own `cost_analysis()` counts the body of a loop once; here it counts as often as the loop runs. The text is that
of the optimised program (`compiled.as_text()`): shapes are those of one device, layers are a `while`.
"""

import functools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

BITS = {"pred": 8, "token": 0, "opaque": 0} | {
    name: int(re.findall(r"\d+", name)[0])
    for name in ("s4 s8 s16 s32 s64 u4 u8 u16 u32 u64 bf16 f16 f32 f64 c64 c128 f8e4m3fn f8e5m2 s2 u2").split()
}
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
SHAPE = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{[^{}]*\})?")
INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (.*)$")
COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
# Names of a value, or views of it: nothing is read or written.
FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast while conditional call after-all add-dependency "
    "partition-id replica-id iota async-start async-update async-done copy-done slice-done opt-barrier".split()
)
SPLASH = re.compile(r"splash_mha_(fwd|dq|dkv)")
SPLASH_PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4}  # of [T, H] and [H, T], or [T, T] and [T, H]
CUDNN = re.compile(r"__cudnn\$fmha\w*?(Backward)?$")
CUDNN_PRODUCTS = {None: 2, "Backward": 5}
NO_TRAFFIC = ("AllocateBuffer", "AsyncCollective", "ConcatBitcast", "Sharding")  # custom calls


@dataclass(frozen=True)
class Shape:
    """An array of a device."""

    kind: str
    sizes: tuple[int, ...]
    in_main_memory: bool  # not in an on-chip memory that the compiler manages

    @property
    def bytes(self) -> float:
        return math.prod(self.sizes) * BITS.get(self.kind, 32) / 8


@dataclass
class Instruction:
    name: str
    op: str
    shapes: list[Shape]
    operands: list[str]
    attributes: str
    is_root: bool

    def called(self, *names: str) -> list[str]:
        """Computations that the attributes `names` refer to."""
        found = []
        for name in names:
            for one, several in re.findall(rf"\b{name}=(?:%([\w.\-]+)|\{{([^}}]*)\}})", self.attributes):
                found += [one] if one else [part.strip().lstrip("%") for part in several.split(",")]
        return found


@dataclass(frozen=True)
class Collective:
    """Collectives of one kind over groups of one size."""

    kind: str
    group: int  # devices that take part in each
    per_host: int  # of them, those that share a host
    count: float
    bytes: float  # that each device sends: all-reduce sends nearly twice its operand, the others nearly once


@dataclass(frozen=True)
class Costs:
    """Of one call, on one device."""

    flops: float = 0.0  # of products; a multiplication and an addition are two
    bytes: float = 0.0  # read from and written to the device's main memory
    collectives: tuple[Collective, ...] = ()
    unknown: tuple[str, ...] = ()  # what could not be counted: loops without a fixed number of turns, kernels

    @property
    def sent(self) -> float:
        """Bytes that the device sends to others."""
        return sum(collective.bytes for collective in self.collectives)


@dataclass
class _Total:
    flops: float = 0.0
    bytes: float = 0.0
    collectives: dict[tuple[str, int, int], list[float]] = field(  # count and bytes by kind, group and part on a host
        default_factory=lambda: defaultdict(lambda: [0.0, 0.0])
    )
    unknown: set[str] = field(default_factory=set)
    channels: set[str] = field(default_factory=set)


def program_costs(text: str, hosts: Sequence[int]) -> Costs:
    """The costs of the program that `compiled.as_text()` shows.

    Args:
        hosts: of each device of the mesh, in its order, the number of the host that it belongs to.
    """
    computations, entry = parse(text)
    total = _Total()
    _Counter(computations, hosts, total).visit(entry, 1.0)
    collectives = tuple(Collective(*key, *values) for key, values in sorted(total.collectives.items()))
    return Costs(total.flops, total.bytes, collectives, tuple(sorted(total.unknown)))


def parse(text: str) -> tuple[dict[str, dict[str, Instruction]], str]:
    """The instructions of each computation by name, and the entry computation's name."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        header = COMPUTATION.match(line)
        if header:
            current = computations[header[2]] = {}
            entry = header[2] if header[1] else entry
        elif current is not None and (found := INSTRUCTION.match(line)):
            instruction = _instruction(found[2], found[3], is_root=bool(found[1]))
            current[instruction.name] = instruction
    return computations, entry


def _instruction(name: str, rest: str, *, is_root: bool) -> Instruction:
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    kind, rest = rest[:end], rest[end:].lstrip()
    opening = rest.index("(")
    closing = _closing(rest, opening)
    operands = re.findall(r"%([\w.\-]+)", rest[opening : closing + 1])
    inside = rest[opening + 1 : closing]
    shapes = [_shape(match) for match in SHAPE.finditer(kind)]
    return Instruction(name, rest[:opening], shapes, operands or [inside], rest[closing + 1 :], is_root)


def _closing(text: str, opening: int) -> int:
    depth = 0
    for index in range(opening, len(text)):
        depth += (text[index] == "(") - (text[index] == ")")
        if depth == 0:
            return index
    raise ValueError(f"no closing bracket in {text[:80]}")


def _shape(match: re.Match[str]) -> Shape:
    sizes = tuple(int(size.lstrip("<=")) for size in match[2].split(",") if size)
    space = re.search(r"S\((\d+)\)", match[0])
    return Shape(match[1], sizes, space is None or space[1] == "0")


class _Counter:
    def __init__(
        self, computations: Mapping[str, Mapping[str, Instruction]], hosts: Sequence[int], total: _Total
    ) -> None:
        self.computations, self.hosts, self.total = computations, hosts, total

    def visit(self, name: str, times: float, *, fused: bool = False) -> None:
        """Adds a computation that runs `times` times; what is fused is not written to memory."""
        for instruction in self.computations[name].values():
            op = instruction.op.removesuffix("-start")
            if op in COLLECTIVES:
                self._collective(op, instruction, name, times)
            if op == "while":
                turns = self._turns(instruction)
                if turns is None:
                    self.total.unknown.add("a loop whose turns depend on data, counted once")
                for body in instruction.called("body"):
                    self.visit(body, times * (turns or 1))
                continue
            if op == "fusion":
                for called in instruction.called("calls"):
                    self.visit(called, times, fused=True)
            elif op in ("call", "conditional", "async"):
                called = instruction.called(
                    "to_apply", "calls", "branch_computations", "true_computation", "false_computation"
                )
                for branch in called:
                    self.visit(branch, times / len(called) if op == "conditional" else times, fused=fused)
            elif op in ("dot", "convolution", "custom-call"):
                self._products(op, instruction, name, times)
            if not fused:
                self.total.bytes += times * self._bytes(instruction, name)

    def _turns(self, loop: Instruction) -> int | None:
        """How often the body runs: what XLA knows, or the bound that the counter, from 0, is compared with."""
        known = re.search(r'known_trip_count"?:\s*\{"?n"?:\s*"?(\d+)', loop.attributes)
        if known:
            return int(known[1])
        (condition,), (body,) = (map(self.computations.get, loop.called(name)) for name in ("condition", "body"))
        assert condition is not None and body is not None
        compare = next((one for one in condition.values() if one.op == "compare"), None)
        bound = compare and _constant(condition.get(compare.operands[-1]))
        if compare is None or bound is None:
            return None
        return -(-bound // _step(condition[compare.operands[0]], body))

    def _collective(self, kind: str, instruction: Instruction, name: str, times: float) -> None:
        channel = re.search(r"channel_id=(\d+)", instruction.attributes)
        if channel is not None:  # one that overlaps with computation stands in several fusions
            if channel[1] in self.total.channels:
                return
            self.total.channels.add(channel[1])
        group, per_host = self._group(kind, instruction.attributes)
        operands = sum(shape.bytes for shape in self._operands(instruction, name))
        if kind == "all-reduce" and "all-reduce-scatter" in name:
            kind = "reduce-scatter"  # on a TPU, a fusion of an all-reduce with the slice that is kept
        share = (group - 1) / group
        if kind == "all-gather":
            sent = operands * (group - 1)
        elif kind == "all-reduce":
            sent = 2 * operands * share
        elif kind == "collective-permute":
            sent = operands
        else:
            sent = operands * share
        found = self.total.collectives[kind, group, per_host]
        found[0] += times
        found[1] += times * sent

    def _group(self, kind: str, attributes: str) -> tuple[int, int]:
        """How many devices take part, and of them, how many share a host."""
        if kind == "collective-permute":
            pairs = re.findall(r"(\d+),(\d+)", re.findall(r"source_target_pairs=\{(.*?)\}\}", attributes + "}}")[0])
            return 2, 2 - any(self.hosts[int(one)] != self.hosts[int(other)] for one, other in pairs)
        devices = _first_group(attributes, len(self.hosts))
        return len(devices), min(Counter(self.hosts[device] for device in devices).values())

    def _operands(self, instruction: Instruction, name: str) -> list[Shape]:
        known = self.computations[name]
        return [shape for operand in instruction.operands if operand in known for shape in known[operand].shapes]

    def _products(self, op: str, instruction: Instruction, name: str, times: float) -> None:
        if op == "custom-call":
            estimate = re.search(r'"cost_estimate":\s*\{[^}]*"flops":\s*"?(\d+)', instruction.attributes)
            target = re.search(r'custom_call_target="([^"]+)"', instruction.attributes)
            if estimate:
                self.total.flops += times * float(estimate[1])
            elif splash := SPLASH.match(instruction.name):
                self.total.flops += times * _splash(splash[1], self._operands(instruction, name))
            elif target and (kernel := CUDNN.match(target[1])):
                self.total.flops += times * _cudnn(kernel[1], self._operands(instruction, name)[0], instruction)
            elif target and "__cublas$" in target[1]:
                self.total.flops += times * _cublas(self._operands(instruction, name)[0], instruction)
            elif target and ("tpu_custom_call" in target[1] or "gemm" in target[1] or "cudnn" in target[1]):
                self.total.unknown.add(f"FLOPs of {target[1]}")
            return
        left, right = self._operands(instruction, name)[:2]
        output = instruction.shapes[0]
        if op == "dot":
            contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
            sizes = [left.sizes[int(i)] for i in contracted[1].split(",") if i] if contracted else []
            self.total.flops += times * 2.0 * math.prod(output.sizes) * math.prod(sizes)
        else:
            self.total.flops += times * 2.0 * _convolution(left, right, output, instruction.attributes)

    def _bytes(self, instruction: Instruction, name: str) -> float:
        """What the instruction reads and writes in main memory: of what it slices or updates, only that part."""
        op, operands = instruction.op, self._operands(instruction, name)
        if op in FREE or (op == "custom-call" and any(target in instruction.attributes for target in NO_TRAFFIC)):
            return 0.0
        if op.removesuffix("-done") in COLLECTIVES:
            return 0.0  # counted at its start, which gives operand and result, of an all-reduce the result alone
        if op.removesuffix("-start") in COLLECTIVES and op.endswith("-start"):
            return _main(instruction.shapes) * (2 if op == "all-reduce-start" else 1)
        if op in ("copy-start", "slice-start"):  # (destination, source, ...)
            return 2 * instruction.shapes[0].bytes if op == "slice-start" else _main(instruction.shapes[:2])
        if op in ("dynamic-slice", "slice", "gather"):
            return _main(instruction.shapes) + _main([instruction.shapes[0]])
        if op == "dynamic-update-slice":
            return 2 * _main(operands[1:2])
        if op == "fusion":
            (called,) = instruction.called("calls")
            return self._fusion_bytes(called)
        return _main(operands) + _main(instruction.shapes)

    def _fusion_bytes(self, name: str) -> float:
        body = self.computations[name]
        users: dict[str, list[tuple[Instruction, int]]] = defaultdict(list)
        for instruction in body.values():
            for place, operand in enumerate(instruction.operands):
                users[operand].append((instruction, place))

        def read(value: Instruction) -> float:
            total = 0.0
            for user, place in users[value.name]:
                if user.op == "bitcast" or user.op == "get-tuple-element":
                    total += read(user)
                elif user.op in ("dynamic-slice", "slice", "gather") and place == 0:
                    total += user.shapes[0].bytes
                elif user.op == "dynamic-update-slice" and place == 0:
                    total += 0.0
                else:
                    return _everything(value)
            return min(total, _everything(value))

        def written(value: Instruction) -> float:
            if value.op == "tuple":
                return sum(written(body[operand]) for operand in value.operands if operand in body)
            if value.op == "bitcast" and value.operands[0] in body:
                return written(body[value.operands[0]])
            if value.op == "dynamic-update-slice":
                return _everything(body[value.operands[1]])
            return _main(value.shapes)

        total = 0.0
        for instruction in body.values():
            if instruction.op == "parameter" and all(shape.in_main_memory for shape in instruction.shapes):
                total += read(instruction)
            if instruction.is_root and any(shape.in_main_memory for shape in instruction.shapes):
                total += written(instruction)
        return total


def _splash(part: str, operands: list[Shape]) -> float:
    """FLOPs of JAX' splash attention under a causal mask, which leaves out the blocks above the diagonal."""
    blocks = next(shape.sizes[-1] for shape in operands if shape.kind == "s8")  # [.., query blocks, key blocks]
    query = max((shape.sizes for shape in operands if shape.kind in ("bf16", "f16")), key=math.prod)
    length = query[-2]
    return SPLASH_PRODUCTS[part] * 2.0 * math.prod(query) * length * (blocks + 1) / (2 * blocks)


def _cudnn(direction: str | None, query: Shape, instruction: Instruction) -> float:
    """FLOPs of cuDNN's attention, whose attributes give the shape of the scores; half of them under a causal mask."""
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


def _first_group(attributes: str, num_devices: int) -> list[int]:
    """The devices of a collective's first group; all of them where the text does not list any."""
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", attributes)
    if mesh:  # mesh['data'=1,'fsdp'=4] {'fsdp'}; a part of an axis is written 'fsdp':(before)size
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        chosen = np.arange(math.prod(sizes.values())).reshape(*sizes.values())
        taken = {name: (before, size) for name, before, size in re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", mesh[2])}
        for place, (name, whole) in enumerate(sizes.items()):
            before, size = taken.get(name, ("", "1"))
            size = int(size or whole) if name in taken else 1
            stride = whole // (int(before or 1) * size)
            chosen = np.take(chosen, np.arange(size) * stride, axis=place)
        return chosen.reshape(-1).tolist()
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes)
    if iota:
        groups, dimensions, order = ([int(x) for x in part.split(",")] if part else None for part in iota.groups())
        assert groups is not None and dimensions is not None
        devices = np.arange(math.prod(dimensions)).reshape(dimensions).transpose(order)
        return devices.reshape(groups)[0].tolist()
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", attributes)
    return [int(x) for x in listed[1].split(",")] if listed else list(range(num_devices))


def _constant(value: Instruction | None) -> int | None:
    """The value of an integer constant."""
    if value is None or value.op != "constant" or value.shapes[0].kind not in ("s32", "u32", "s64"):
        return None
    return int(value.operands[0])


def _step(counter: Instruction, body: Mapping[str, Instruction]) -> int:
    """What a turn adds to the counter, an element of the loop's tuple; more than 1 where XLA has unrolled the body."""
    place = re.search(r"index=(\d+)", counter.attributes)
    root = next(one for one in body.values() if one.is_root)
    value = body.get(root.operands[int(place[1])]) if place else None
    step = 0
    while value is not None and value.op in ("add", "copy", "bitcast"):
        added = [constant for operand in value.operands if (constant := _constant(body.get(operand))) is not None]
        step += sum(added)
        value = next((body[name] for name in value.operands if name in body and body[name].op != "constant"), None)
    return max(step, 1)


def _everything(value: Instruction) -> float:
    return sum(shape.bytes for shape in value.shapes)


def _main(shapes: list[Shape]) -> float:
    return sum(shape.bytes for shape in shapes if shape.in_main_memory)


def _convolution(left: Shape, right: Shape, output: Shape, attributes: str) -> float:
    """Multiplications of a convolution; TPUs write every product of matrices as one."""
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
    """stride, low padding and dilations of each spatial dimension."""
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
    """Pairs of output place and window place that meet an element, and not padding or the holes of a dilation."""
    if (stride, padding, left_dilation) == (1, 0, 1) and size == output + (window - 1) * right_dilation:
        return output * window
    reached = (left_dilation * (size - 1)) + 1
    return sum(
        0 <= place < reached and place % left_dilation == 0
        for first in range(-padding, -padding + window * right_dilation, right_dilation)
        for place in range(first, first + output * stride, stride)
    )


