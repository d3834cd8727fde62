"""Host: parses the text of a compiled program (`compiled.as_text()`) into computations and instructions."""

import math
import re
from dataclasses import dataclass

import numpy as np

BITS = {"pred": 8, "token": 0, "opaque": 0} | {
    name: int(re.findall(r"\d+", name)[0])
    for name in ("s4 s8 s16 s32 s64 u4 u8 u16 u32 u64 bf16 f16 f32 f64 c64 c128 f8e4m3fn f8e5m2 s2 u2").split()
}
SHAPE = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{[^{}]*\})?")
INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (.*)$")
COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")


@dataclass(frozen=True)
class Shape:
    """An array on one device."""

    kind: str
    sizes: tuple[int, ...]
    in_main_memory: bool  # False: in on-chip memory that the compiler manages

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

    @property
    def target(self) -> str:
        """The target of a custom call; "" for other instructions."""
        found = re.search(r'custom_call_target="([^"]+)"', self.attributes)
        return found[1] if found else ""

    def called(self, *names: str) -> list[str]:
        """The computations that the attributes `names` refer to."""
        found = []
        for name in names:
            for one, several in re.findall(rf"\b{name}=(?:%([\w.\-]+)|\{{([^}}]*)\}})", self.attributes):
                found += [one] if one else [part.strip().lstrip("%") for part in several.split(",")]
        return found


def parse(text: str) -> tuple[dict[str, dict[str, Instruction]], str]:
    """The instructions of each computation, by name, and the name of the entry computation."""
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


def first_group(attributes: str, num_devices: int) -> list[int]:
    """The devices of a collective's first group; all devices if the text lists none."""
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", attributes)
    if mesh:  # mesh['data'=1,'fsdp'=4] {'fsdp'}; part of an axis is written 'fsdp':(before)size
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
