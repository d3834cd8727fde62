"""Host: compiles programs for hardware that this machine may lack, and caches what is known of them."""

import gzip
import hashlib
import importlib.metadata
import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from dapo_jax.parallel.compilation import CACHE
from dapo_jax.parallel.gpus import GPUS

COMPILERS = "jax jaxlib libtpu jax-cuda12-pjrt jax-cuda13-pjrt nvidia-cudnn-cu12 nvidia-cudnn-cu13".split()


@dataclass(frozen=True)
class Compiled:
    """The optimised text of a compiled program, and its memory."""

    text: str  # of one device
    bytes: float  # in a device's memory during a call: arguments, results, temporaries, code


def compile_ahead(lowered: jax.stages.Lowered, mesh: Mesh, *, directory: str = "") -> Compiled:
    """Compiles `lowered` for the devices of `mesh`, or returns what the same compiler made of it before.

    JAX's own cache cannot read programs compiled for absent devices.

    Args:
        directory: where results are cached, unless CACHE names another; "": nowhere.
    """
    directory = os.environ.get(CACHE, directory)
    path = Path(directory).expanduser() / "ahead_of_time" / _key(lowered, mesh) if directory else None
    if path is not None and path.exists():
        path.touch()  # scripts/test_accelerators.sh deletes what was not used for 30 days
        return Compiled(**json.loads(gzip.decompress(path.read_bytes())))
    program = lowered.compile()
    taken, text = program.memory_analysis(), program.as_text()
    assert taken is not None and text is not None
    total = taken.argument_size_in_bytes + taken.output_size_in_bytes - taken.alias_size_in_bytes
    compiled = Compiled(text, float(total + taken.temp_size_in_bytes + taken.generated_code_size_in_bytes))
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(gzip.compress(json.dumps(asdict(compiled)).encode(), compresslevel=1))
        os.replace(file.name, path)
    return compiled


def _key(lowered: jax.stages.Lowered, mesh: Mesh) -> str:
    """Differs wherever the compiled program might."""
    devices = mesh.devices.flat
    options: Any = lowered._lowering  # no public name has the options that the function was jitted with
    known = {
        "program": lowered.as_text(),
        "options": dict(options._compiler_options_kvs),
        "flags": [os.environ.get(name) for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")],
        "devices": [f"{device.device_kind} {device.process_index} {device.id}" for device in devices],
        "targets": [gpu.target_config for gpu in GPUS.values() if gpu.kind == devices[0].device_kind],
        "compilers": {name: _version(name) for name in COMPILERS},
    }
    return hashlib.sha256(json.dumps(known).encode()).hexdigest() + ".json.gz"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
