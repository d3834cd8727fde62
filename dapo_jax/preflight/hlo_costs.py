"""Host: FLOPs, memory traffic and collectives per device of a compiled program, read from its text.

XLA's own `cost_analysis()` counts a loop's body once; here it counts once per iteration. Of a conditional, the branch
that moves most counts: programs with a branch for limited draws are those of limited draws. The text is the optimised
program (`compiled.as_text()`): shapes are per device, and the layers are a `while` loop.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dapo_jax.preflight.calibration import Kernel, kind_of
from dapo_jax.preflight.hlo_products import Pairs, product_flops, unread_bytes
from dapo_jax.preflight.hlo_text import Instruction, Shape, first_group, parse

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
# These only name or view a value: nothing is read or written.
FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast while conditional call after-all add-dependency "
    "partition-id replica-id iota async-start async-update opt-barrier".split()
)
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # the operand with what is written into the first one
NO_TRAFFIC = ("AllocateBuffer", "AsyncCollective", "ConcatBitcast", "Sharding")  # custom calls


@dataclass(frozen=True)
class Collective:
    """Collectives of one kind over groups of one size."""

    kind: str
    group: int  # devices in each
    per_host: int  # of these devices, those on one host
    count: float
    bytes: float  # sent by each device: all-reduce sends nearly twice its operand, the others nearly once


@dataclass(frozen=True)
class Costs:
    """The costs of one call on one device."""

    flops: float = 0.0  # of matrix products; a multiplication and an addition count as two
    bytes: float = 0.0  # read from and written to the device's main memory
    collectives: tuple[Collective, ...] = ()
    unknown: tuple[str, ...] = ()  # what could not be counted: loops of unknown length, unknown kernels
    kernels: tuple[tuple[Kernel, float], ...] = ()  # that are launched, and how often

    @property
    def sent(self) -> float:
        """Bytes that the device sends to other devices."""
        return sum(collective.bytes for collective in self.collectives)

    @property
    def launches(self) -> float:
        """Kernels that run one after the other."""
        return sum(times for _, times in self.kernels)


@dataclass
class _Total:
    flops: float = 0.0
    bytes: float = 0.0
    collectives: dict[tuple[str, int, int], list[float]] = field(  # count and bytes by kind, group and per_host
        default_factory=lambda: defaultdict(lambda: [0.0, 0.0])
    )
    unknown: set[str] = field(default_factory=set)
    channels: set[tuple] = field(default_factory=set)
    kernels: dict[Kernel, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, other: "_Total") -> None:
        self.flops += other.flops
        self.bytes += other.bytes
        for key, (count, sent) in other.collectives.items():
            self.collectives[key][0] += count
            self.collectives[key][1] += sent
        self.unknown |= other.unknown
        self.channels |= other.channels
        for kernel, times in other.kernels.items():
            self.kernels[kernel] += times


def program_costs(text: str, hosts: Sequence[int], pairs: Pairs = None) -> Costs:
    """The costs of a program.

    Args:
        text: `compiled.as_text()`.
        hosts: the host's number of each device, in the order of the mesh.
        pairs: see `Program.pairs`.
    """
    computations, entry = parse(text)
    total = _Total()
    _Counter(computations, hosts, total, pairs).visit(entry, 1.0)
    collectives = tuple(Collective(*key, *values) for key, values in sorted(total.collectives.items()))
    return Costs(total.flops, total.bytes, collectives, tuple(sorted(total.unknown)), tuple(total.kernels.items()))


class _Counter:
    def __init__(
        self,
        computations: Mapping[str, Mapping[str, Instruction]],
        hosts: Sequence[int],
        total: _Total,
        pairs: Pairs,
    ) -> None:
        self.computations, self.hosts, self.total, self.pairs = computations, hosts, total, pairs

    def visit(self, name: str, times: float, *, fused: bool = False) -> None:
        """Adds a computation that runs `times` times. Inside a fusion, nothing goes through memory."""
        for instruction in self.computations[name].values():
            op, before = instruction.op.removesuffix("-start"), self.total.flops
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
            elif op in ("call", "async"):
                for called in instruction.called("to_apply", "calls"):
                    self.visit(called, times, fused=fused)
            elif op == "conditional":
                called = instruction.called("branch_computations", "true_computation", "false_computation")
                self.total.add(max((self._alone(branch, times) for branch in called), key=lambda one: one.bytes))
            elif op in ("dot", "convolution", "custom-call"):
                flops = product_flops(instruction, self._operands(instruction, name), self.pairs)
                if flops is None:
                    self.total.unknown.add(f"FLOPs of {instruction.target}")
                self.total.flops += times * (flops or 0.0)
            if not fused and (moved := self._bytes(instruction, name)):
                self.total.bytes += times * moved
                flops = (self.total.flops - before) / times
                self.total.kernels[Kernel(kind_of(instruction, flops), flops, moved)] += times

    def _alone(self, branch: str, times: float) -> _Total:
        total = _Total(channels=set(self.total.channels))
        _Counter(self.computations, self.hosts, total, self.pairs).visit(branch, times)
        return total

    def _turns(self, loop: Instruction) -> int | None:
        """How often the body runs: XLA's own count, or the bound on a counter that starts at 0; None if unknown."""
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
        group, per_host = self._group(kind, instruction.attributes)
        operands = sum(shape.bytes for shape in self._operands(instruction, name))
        channel = re.search(r"channel_id=(\d+)", instruction.attributes)
        if channel is not None:  # a collective that overlaps with computation appears in several fusions
            same = channel[1], kind, group, operands  # different collectives may share a channel
            if same in self.total.channels:
                return
            self.total.channels.add(same)
        if kind == "all-reduce" and "all-reduce-scatter" in name:
            kind = "reduce-scatter"  # on TPUs, an all-reduce fused with the slice of its result
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
        """The number of devices that take part, and how many of them share a host."""
        if kind == "collective-permute":
            pairs = re.findall(r"(\d+),(\d+)", re.findall(r"source_target_pairs=\{(.*?)\}\}", attributes + "}}")[0])
            return 2, 2 - any(self.hosts[int(one)] != self.hosts[int(other)] for one, other in pairs)
        devices = first_group(attributes, len(self.hosts))
        return len(devices), min(Counter(self.hosts[device] for device in devices).values())

    def _operands(self, instruction: Instruction, name: str) -> list[Shape]:
        known = self.computations[name]
        return [shape for operand in instruction.operands if operand in known for shape in known[operand].shapes]

    def _bytes(self, instruction: Instruction, name: str) -> float:
        """Bytes that the instruction reads and writes in main memory; of a slice or an update, only that part.

        An asynchronous operation counts at its start. `X-start` returns the operands of X, its results and counters on
        the chip; but `copy-start` returns destination and source, and `all-reduce-start` only its result.
        """
        op, operands, results = instruction.op, self._operands(instruction, name), instruction.shapes
        if op in FREE or op.endswith("-done"):
            return 0.0
        if op == "copy-start":
            return _main(results[:2])
        if op.endswith("-start"):
            op = op.removesuffix("-start")
            results = results if op == "all-reduce" else results[len(operands) :]
        if op == "custom-call" and any(target in instruction.attributes for target in NO_TRAFFIC):
            return 0.0
        if op == "custom-call" and instruction.target.startswith(("__cublas", "__cudnn")):
            return _main(operands) + _main([shape for shape in results if shape.kind not in ("s8", "u8")])
        if op in ("dynamic-slice", "slice", "gather"):
            return _main(results) + (results[0].bytes if _main(operands[:1]) else 0.0)
        if op in UPDATES:
            update = operands[UPDATES[op]]
            return _main([update]) + (update.bytes if _main(results) else 0.0)
        if op == "fusion":
            (called,) = instruction.called("calls")
            return self._fusion_bytes(called)
        unread = unread_bytes(instruction, operands, self.pairs) if op == "custom-call" else 0.0
        return _main(operands) + _main(results) - unread

    def _fusion_bytes(self, name: str) -> float:
        total = 0.0
        for instruction in self.computations[name].values():
            in_main_memory = [shape.in_main_memory for shape in instruction.shapes]
            if instruction.op == "parameter" and all(in_main_memory):
                total += self._read(instruction, name)
            if instruction.is_root and any(in_main_memory):
                total += self._written(instruction, name)
        return total

    def _read(self, value: Instruction, name: str) -> float:
        """Bytes that a fusion, of computation `name`, reads of one of its values: slices of it, or all."""
        total = 0.0
        for user in self.computations[name].values():
            for place in [place for place, operand in enumerate(user.operands) if operand == value.name]:
                if user.op == "bitcast" or user.op == "get-tuple-element":
                    total += self._read(user, name)
                elif user.op == "fusion":
                    (called,) = user.called("calls")
                    total += self._read(_parameter(self.computations[called], place), called)
                elif user.op in ("dynamic-slice", "slice", "gather") and place == 0:
                    total += user.shapes[0].bytes
                elif user.op not in UPDATES or place > 0:
                    return _everything(value)
        return min(total, _everything(value))

    def _written(self, value: Instruction, name: str) -> float:
        """Bytes that a fusion writes of its result: of an update, only the part."""
        body = self.computations[name]
        if value.op == "tuple":
            return sum(self._written(body[operand], name) for operand in value.operands if operand in body)
        if value.op == "bitcast" and value.operands[0] in body:
            return self._written(body[value.operands[0]], name)
        if value.op == "fusion" and _main(value.shapes):
            (called,) = value.called("calls")
            return self._written(next(one for one in self.computations[called].values() if one.is_root), called)
        if value.op in UPDATES:
            return _everything(body[value.operands[UPDATES[value.op]]]) if _main(value.shapes) else 0.0
        return _main(value.shapes)


def _parameter(body: Mapping[str, Instruction], number: int) -> Instruction:
    return next(one for one in body.values() if one.op == "parameter" and one.operands == [str(number)])


def _constant(value: Instruction | None) -> int | None:
    """The value of an integer constant; None for anything else."""
    if value is None or value.op != "constant" or value.shapes[0].kind not in ("s32", "u32", "s64"):
        return None
    return int(value.operands[0])


def _step(counter: Instruction, body: Mapping[str, Instruction]) -> int:
    """The loop counter's increment per iteration: more than 1 if XLA has unrolled the body."""
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
