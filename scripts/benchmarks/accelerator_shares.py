"""Host: where the time of a device goes, by classes of kernels, from a profile of JAX."""

import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from accelerator_findings import Findings

CLASSES = {  # the first whose pattern a kernel's name has, or that of XLA's instruction
    "attention": "attention|splash|flash|fmha",
    "products": "dot|gemm|convolution|cutlass|cublas|nvjet|ynn|grouped_|block_sums|chosen_block",
    "elementwise, sums, copies": "",
}
BETWEEN = "between kernels"


class Kernel(NamedTuple):
    """A kernel that ran on a device; times in nanoseconds."""

    name: str
    start: float
    end: float


def show_shares(findings: Findings, call: Callable[[], Any], part: str) -> None:
    """Profiles one call and adds a table of what its device did, from its first kernel to its last.

    Args:
        part: what is called, as the table names it.
    """
    import jax

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            start = time.perf_counter()
            call()
            seconds = time.perf_counter() - start
        lines = list(device_lines(Path(folder)))
    if not any(lines):
        findings.note(f"JAX's profiler has seen no kernel: where the time of the {part} goes is not known.")
        return
    findings.note(f"The {part} that was profiled took {seconds:.3g} s.")
    for row in shares(lines):
        findings.row(f"Where the time of the {part} goes, by a profile", **row)


def device_lines(folder: Path) -> Iterator[list[Kernel]]:
    """The kernels of the first device in a profile, those of each of its queues; of a CPU, those of each thread."""
    import jax

    paths = list(folder.rglob("*.xplane.pb"))
    planes = [plane for path in paths for plane in jax.profiler.ProfileData.from_file(str(path)).planes]
    of_device = [plane for plane in planes if re.fullmatch(r"/device:(GPU|TPU):0", plane.name)]
    for plane in of_device or [plane for plane in planes if plane.name == "/host:CPU"]:
        for line in plane.lines:
            if not of_device or line.name.startswith(("Stream", "XLA Ops")):  # other lines sum these up
                yield [kernel for event in line.events if (kernel := _kernel(event, known=bool(of_device)))]


def _kernel(event: Any, *, known: bool) -> Kernel | None:
    """The kernel of an event; None of one that may be something else, unless all events are `known` to be kernels."""
    found = dict(event.stats)
    if not known and "hlo_op" not in found:
        return None
    names = event.name.partition(" = ")[0], found.get("hlo_op", ""), found.get("hlo_category", "")
    return Kernel(" ".join(map(str, names)), event.start_ns, event.end_ns)


def shares(lines: Iterable[list[Kernel]]) -> list[dict[str, Any]]:
    """A row for each class of kernels, and one for the time in which none ran.

    Of a kernel that encloses others, as a loop does, its own time counts. Kernels of several lines may overlap: their
    shares add up to more than all.
    """
    times, counts = dict.fromkeys(CLASSES, 0.0), dict.fromkeys(CLASSES, 0)
    outermost: list[Kernel] = []
    for line in lines:
        ordered = sorted(line, key=lambda kernel: (kernel.start, -kernel.end))
        own = [kernel.end - kernel.start for kernel in ordered]
        around: list[int] = []  # places of kernels that have not ended
        for place, kernel in enumerate(ordered):
            while around and ordered[around[-1]].end <= kernel.start:
                around.pop()
            if around:
                own[around[-1]] -= kernel.end - kernel.start
            else:
                outermost.append(kernel)
            around.append(place)
        for kernel, spent in zip(ordered, own, strict=True):
            kind = next(kind for kind, pattern in CLASSES.items() if re.search(pattern, kernel.name.lower()))
            times[kind] += spent
            counts[kind] += 1
    busy, until = 0.0, 0.0
    for kernel in sorted(outermost, key=lambda kernel: kernel.start):
        busy += max(kernel.end - max(kernel.start, until), 0.0)
        until = max(until, kernel.end)
    span = until - min(kernel.start for kernel in outermost)
    rows = [{"of": kind, "kernels": counts[kind], "ms": times[kind] / 1e6} for kind in CLASSES]
    rows.append({"of": BETWEEN, "kernels": None, "ms": (span - busy) / 1e6})
    return [row | {"share of the time": row["ms"] * 1e6 / span} for row in rows]
