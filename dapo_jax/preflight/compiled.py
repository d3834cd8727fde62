"""Host: one program of a step: compiled for devices that may be absent, with its memory and its costs."""

import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import Mesh

from dapo_jax.errors import InputError
from dapo_jax.learner.trainable import HOST
from dapo_jax.parallel.compilation import compile_ahead
from dapo_jax.preflight.hlo_costs import Costs, program_costs
from dapo_jax.preflight.hlo_products import Pairs

TEMPORARIES = "temporaries"  # of a call
# What lies in a device's memory for longer than a call.
KINDS = ("parameters", "optimizer", "gradients", "decoding weights", "KV cache")
PARAMETERS, OPTIMIZER, GRADIENTS, DECODING, CACHE = KINDS
Lower = Callable[[], jax.stages.Lowered]
Sizes = Mapping[str, float]  # bytes on one device by kind


@dataclass(frozen=True)
class Program:
    """A compiled function of a training step."""

    stage: str
    name: str
    calls: float  # in a training step
    lower: Lower  # sets the mesh that the program runs on
    inside: Sizes  # arguments and results that outlive the call
    beside: Sizes = field(default_factory=dict)  # what lies in memory meanwhile
    # scores that a kernel of attention computes for a bin and a head; None = those on and below the diagonal.
    pairs: Pairs = None

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for the same program of two steps. Names are of one step: they leave out what is the same in all."""
        return self.name, self.pairs, *sorted(self.inside.items())


@dataclass(frozen=True)
class Compiled:
    """A compiled program. `bytes` and `costs` are per device, `costs` also per call."""

    program: Program
    bytes: dict[str, float]  # in memory during a call, by kind
    costs: Costs | None  # None if XLA refuses the program because it exceeds the device's memory
    compile_s: float

    @property
    def total(self) -> float:
        return sum(self.bytes.values())


def device_bytes(tree: Any, *, kind: str | None = None) -> float:
    """Bytes on one device of shapes with shardings; those in the host's memory only if `kind` is HOST."""
    return float(
        sum(
            math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
            for leaf in jax.tree.leaves(tree)
            if (leaf.sharding.memory_kind == HOST) == (kind == HOST)
        )
    )


def compile_program(program: Program, mesh: Mesh, cache: str) -> Compiled:
    """Compiles a program and reads its memory and costs.

    Args:
        mesh: any mesh of the program's devices in their order.
        cache: the directory for results; "" = no cache.

    Raises:
        InputError: the program needs cuDNN, which is not installed.
    """
    start = time.perf_counter()
    found: dict[str, float] = {kind: program.inside.get(kind, 0.0) + program.beside.get(kind, 0.0) for kind in KINDS}
    inside = sum(program.inside.values())
    try:
        executable = compile_ahead(program.lower(), mesh, directory=cache)
    except jax.errors.JaxRuntimeError as error:
        temporaries = refused(str(error), inside)
        if temporaries is None:
            raise
        found[TEMPORARIES] = temporaries
        return Compiled(program, found, None, time.perf_counter() - start)
    except RuntimeError as error:
        if "cuDNN" not in str(error):
            raise
        raise InputError(
            f"{program.name} needs cuDNN to compile ({error}): pip install --no-deps 'nvidia-cudnn-cu13<10', or set "
            "model.attention=xla"
        ) from error
    found[TEMPORARIES] = max(executable.bytes - inside, 0.0)
    seconds = time.perf_counter() - start
    hosts = [device.process_index for device in mesh.devices.flat]
    return Compiled(program, found, program_costs(executable.text, hosts, program.pairs), seconds)


def refused(message: str, inside: float) -> float | None:
    """The bytes of temporaries of a program that XLA refuses for lack of memory; None for any other error.

    Args:
        inside: bytes of its arguments and results, which some messages include.
    """
    of_all = re.search(r"Used ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm", message)
    alone = re.search(r"temporaries \(([\d.]+)([KMGT]?)\) exceeds available HBM", message)
    size = of_all or alone
    if size is None:
        return None
    return max(float(size[1]) * 1024.0 ** " KMGT".index(size[2] or " ") - (inside if of_all else 0.0), 0.0)
