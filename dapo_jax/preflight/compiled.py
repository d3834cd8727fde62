"""Host: compiles one program of a step, for devices that may be absent, and measures its memory and costs."""

import re
import time
from dataclasses import dataclass

import jax
from jax.sharding import Mesh

from dapo_jax.errors import InputError
from dapo_jax.parallel.compilation import compile_ahead
from dapo_jax.preflight.hlo_costs import Costs, program_costs
from dapo_jax.preflight.programs import KINDS, Program

TEMPORARIES = "temporaries"


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
