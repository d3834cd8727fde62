"""Host: the time to expect of a program, from the rates that kernels of one H100 have reached.

The bound of a program divides all its FLOPs and bytes by the device's peaks. Here each kernel takes the longer of its
FLOPs and its bytes at the share of these peaks that its class has reached, and a fixed time, which is most of the time
of small kernels that wait for each other, as in decoding. Links count at their peak: that has not been measured.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from dapo_jax.parallel.devices import Limits
from dapo_jax.parallel.gpus import GPUS
from dapo_jax.preflight.hlo_products import CUDNN, PAGED, TREE
from dapo_jax.preflight.hlo_text import Instruction

PRODUCTS, ATTENTION, WIDE_ATTENTION, ELEMENTWISE = "products", "attention", "wide attention", "elementwise"
FIXED = "fixed"  # time of all kernels
WIDE_HEAD = 128  # from which cuDNN's attention is faster than Triton's


class Kernel(NamedTuple):
    """What one launch of a kernel computes and moves; a collective is one too."""

    kind: str  # its class; elementwise: all that compute no products
    flops: float
    bytes: float


@dataclass(frozen=True)
class Rates:
    """What kernels reach of a device's peaks, and what each takes besides."""

    flops: dict[str, float]  # share of the peak by class
    bandwidth: float  # share of the peak
    fixed: float  # seconds


# From the profile of an update of 0.5B (a micro-batch of 208.5 ms: 41 % products, 17 % Triton's attention, 42 %
# elementwise) and of its decoding (3.3 ms and 570 kernels a token). At these rates, without fixed times, the same
# update of 1.5B takes 505 ms; measured: 525.
H100 = Rates(
    flops={PRODUCTS: 665 / 989, ATTENTION: 256 / 989, WIDE_ATTENTION: 410 / 989, ELEMENTWISE: 1.0},
    bandwidth=2.73 / 3.352,
    fixed=3.6e-6,
)
SOURCE = "one H100 has reached with Qwen2.5-0.5B (2026-11-26, commit e321cd7, JAX 0.11.2)"


def rates_of(limits: Limits, dtype: str) -> tuple[Rates | None, str]:
    """The rates for a device with products of `dtype`, and where they are from; None and why there are none."""
    gpu = GPUS.get(limits.name.lower())
    if dtype != "bfloat16":
        return None, f"no kernels in {dtype} have been measured"
    if gpu is None or gpu.capability < (8, 0):
        return None, f"no kernels on {limits.name} have been measured"
    if limits.name == "H100":
        return H100, f"at what {SOURCE}"
    return H100, f"at the shares of the peaks that {SOURCE}, not measured on {limits.name}"


def kind_of(instruction: Instruction, flops: float) -> str:
    """The class of a kernel with products of so many FLOPs."""
    if CUDNN.match(instruction.target):
        return WIDE_ATTENTION if instruction.shapes[0].sizes[-1] >= WIDE_HEAD else ATTENTION
    if instruction.op == "custom-call" and (
        TREE.search(instruction.attributes) or PAGED.search(instruction.attributes)
    ):
        return ATTENTION
    return PRODUCTS if flops else ELEMENTWISE


def expected_seconds(kernels: Iterable[tuple[Kernel, float]], limits: Limits, rates: Rates) -> dict[str, float]:
    """Seconds of kernels that run so many times, by class and for launching them: never less than at the peaks."""
    assert limits.flops is not None and limits.bandwidth is not None
    found: dict[str, float] = {name: 0.0 for name in (PRODUCTS, ATTENTION, ELEMENTWISE, FIXED)}
    for kernel, times in kernels:
        computed = kernel.flops / (rates.flops[kernel.kind] * limits.flops)
        moved = kernel.bytes / (rates.bandwidth * limits.bandwidth)
        found[ATTENTION if kernel.kind == WIDE_ATTENTION else kernel.kind] += times * max(computed, moved)
        found[FIXED] += times * rates.fixed
    return found
