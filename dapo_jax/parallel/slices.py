"""Host: absent TPU slices: their names in Google Cloud and in libtpu, and their devices."""

import os
import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import topologies

from dapo_jax.errors import InputError

# Google's name of a generation -> libtpu's name, units per chip in the number of a name, dimensions of a slice. v4-32
# and v5p-32 have 32 cores on 16 chips; v5litepod-32 and v6e-32 have 32 chips.
GENERATIONS = {
    "v4": ("v4", 2, 3),
    "v5p": ("v5p", 2, 3),
    "v5e": ("v5e", 1, 2),
    "v5litepod": ("v5e", 1, 2),
    "v6e": ("v6e", 1, 2),
}
SLICES = {name for name, _, _ in GENERATIONS.values()}
QUIET = {
    "TPU_SKIP_MDS_QUERY": "1",  # do not query a metadata server
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no chip is opened
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",  # any value, to avoid a warning
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
}


def libtpu_name(topology: str) -> str:
    """libtpu's name of a slice, "v5p:2x2x4", from Google's, "v5p-32"; other names are returned unchanged.

    Raises:
        InputError: no slice has this number; the message suggests the closest ones.
    """
    found = re.fullmatch(rf"({'|'.join(GENERATIONS)})-(\d+)", topology)
    if not found:
        return topology
    name, of_chip, dimensions = GENERATIONS[found[1]]
    number = int(found[2])
    largest = 2048 if dimensions == 3 else 256  # chips; 3 dimensions begin with a host of 4
    chips = [2**power for power in range(2 if dimensions == 3 else 0, largest.bit_length())]
    numbers = [count * of_chip for count in chips if count != 2]
    if number not in numbers:
        close = sorted(sorted(numbers, key=lambda one: abs(one - number))[:2])
        raise InputError(
            f"--topology={topology} must be a slice that Google Cloud offers: choose "
            f"{' or '.join(f'{found[1]}-{one}' for one in close)}, or give its sides, such as "
            f"{name}:{_sides(16, dimensions)}"
        )
    return f"{name}:{_sides(number // of_chip, dimensions)}"


def slice_devices(topology: str) -> Sequence[Any]:
    """The JAX devices of a slice such as "v5e:4x4"."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    jax.config.update("jax_platforms", "cpu")  # keep JAX from looking for a TPU
    options: dict[str, Any] = {}
    if topology.startswith("v4:"):
        options["chip_config_name"] = "megacore"  # one device per chip, as JAX does on a v4
    if re.fullmatch(r"\w+:1(x1)*", topology):
        options["chips_per_host_bounds"] = (1, 1, 1)  # hosts of larger slices have four chips
    return topologies.get_topology_desc(platform="tpu", topology_name=topology, **options).devices


def _sides(chips: int, dimensions: int) -> str:
    """Sides as equal as powers of two allow, the largest last; a 3D slice of 4 chips is 2x2x1."""
    power = chips.bit_length() - 1
    sides = sorted(2 ** ((power + index) // dimensions) for index in range(dimensions))
    if dimensions == 3 and chips == 4:
        sides.reverse()
    return "x".join(str(side) for side in sides)
