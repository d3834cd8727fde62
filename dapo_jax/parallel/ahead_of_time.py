"""Host: compiles programs for hardware this machine may lack, and caches the results between runs."""

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
from dapo_jax.places import expanded

COMPILERS = "jax jaxlib libtpu jax-cuda12-pjrt jax-cuda13-pjrt nvidia-cudnn-cu12 nvidia-cudnn-cu13".split()
EFFORTS = "jax_exec_time_optimization_effort", "jax_optimization_level"  # JAX's settings: up to 0.10, and since


@dataclass(frozen=True)
class Compiled:
    """A compiled program, per device."""

    text: str  # the optimised program
    bytes: float  # memory in use during a call: arguments, results, temporaries, code


def compile_ahead(
    lowered: jax.stages.Lowered, mesh: Mesh, *, directory: str = "", kernels: Path | None = None
) -> Compiled:
    """Compiles `lowered` for the devices of `mesh`, or reads the cached result of the same compiler.

    JAX's own cache cannot read programs that were compiled for absent devices.

    Args:
        directory: the cache, unless the environment variable CACHE names another; "" = no cache.
        kernels: for GPUs, a file of compiled kernels that other programs for the same GPU may share. Written in place:
            one process at a time can use it.
    """
    directory = os.environ.get(CACHE, directory)
    path = expanded(directory) / "ahead_of_time" / program_key(lowered, mesh) if directory else None
    if path is not None and path.exists():
        path.touch()  # scripts/test_accelerators.sh deletes files unused for 30 days
        return Compiled(**json.loads(gzip.decompress(path.read_bytes())))
    program = lowered.compile(compiler_options=_sharing(kernels) if kernels is not None else None)
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


def _sharing(kernels: Path) -> dict[str, Any]:
    options: dict[str, Any] = {"xla_gpu_kernel_cache_file": str(kernels)}
    if jax.__version_info__ < (0, 11):  # later releases always do
        options["xla_gpu_enable_llvm_module_compilation_parallelism"] = True
    return options


def program_key(lowered: jax.stages.Lowered, mesh: Mesh) -> str:
    """A cache key that changes with everything that may change the compiled program."""
    devices = mesh.devices.flat
    options: Any = lowered._lowering  # there is no public way to read the compiler options given to jit
    known = {
        "program": lowered.as_text(),
        "options": dict(options._compiler_options_kvs),
        "flags": [os.environ.get(name) for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")],
        "effort": [str(jax.config.values.get(name)) for name in EFFORTS],
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
