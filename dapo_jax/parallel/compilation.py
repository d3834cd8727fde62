"""Host: compiler options, progress while compiling, compiling in the background, caches of compiled programs."""

import gzip
import hashlib
import importlib.metadata
import json
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

from dapo_jax.config.places import expanded
from dapo_jax.parallel.gpus import GPUS

logger = logging.getLogger(__name__)

# XLA's options by platform for passes over the layers: they overlap gathering weights and scattering gradients with
# the computation of a layer. Sources: JAX, "GPU performance tips" (the first), NVIDIA JAX-Toolbox, "Tips for
# High-Performance LLMs with JAX and XLA" (both). XLA:TPU overlaps by default.
OVERLAP: Mapping[str, Mapping[str, bool]] = {
    "gpu": {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_enable_while_loop_double_buffering": True,  # two layers per iteration, so that they overlap too
    }
}

# XLA chooses only algorithms that add in the same order each time, such as for cuDNN's backward pass of attention.
ORDERED = "xla_gpu_exclude_nondeterministic_ops"
_LOWERED, _COMPILED = (  # events of JAX
    f"/jax/core/compile/{name}_duration" for name in ("jaxpr_to_mlir_module", "backend_compile")
)
CACHE = "JAX_COMPILATION_CACHE_DIR"  # JAX's variable; if set, it takes precedence over the config
COMPILERS = "jax jaxlib libtpu jax-cuda12-pjrt jax-cuda13-pjrt nvidia-cudnn-cu12 nvidia-cudnn-cu13".split()
EFFORTS = "jax_exec_time_optimization_effort", "jax_optimization_level"  # JAX's settings: up to 0.10, and since


@contextmanager
def compilation_shown(show: Callable[[str], None]) -> Iterator[None]:
    """Calls `show` with a text when a program starts to compile, and with "" when none is compiling any more."""
    under_way: set[int] = set()  # threads
    compiled = 0

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        nonlocal compiled
        del duration_secs, kwargs
        if event == _LOWERED:  # XLA starts to compile it
            under_way.add(threading.get_ident())
        elif event == _COMPILED:
            under_way.discard(threading.get_ident())
            compiled += 1
        else:
            return
        show(f"compiling, {compiled} programs so far" if under_way else "")

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def keep_compiled(directory: str | Path, *, every: bool = False, only_here: bool = False) -> None:
    """Caches programs in `directory`, those that take JAX's least time to compile (a second); CACHE takes precedence.

    Args:
        directory: "" = no cache.
        every: also those that compile sooner. A kept program has the kernels that XLA chose by timing them; compiled
            again, it may have others.
        only_here: CACHE takes no precedence.
    """
    if every:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    if directory and (only_here or CACHE not in os.environ):
        jax.config.update("jax_compilation_cache_dir", str(expanded(directory)))
        compilation_cache.reset_cache()  # else an earlier run of this process has chosen the directory


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
    shared: dict[str, Any] = {"xla_gpu_kernel_cache_file": str(kernels)}
    if jax.__version_info__ < (0, 11):  # later releases always do
        shared["xla_gpu_enable_llvm_module_compilation_parallelism"] = True
    program = lowered.compile(compiler_options=None if kernels is None else shared)
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


class Programs:
    """Programs compiled once, by key."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._thread: ThreadPoolExecutor | None = None  # one, since XLA compiles on several threads
        self._found: dict[Hashable, Future[Any]] = {}

    def prepare(self, key: Hashable, lower: Callable[[], jax.stages.Lowered]) -> None:
        """Starts to compile what `lower` returns, unless this key is known."""
        if key not in self._found:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="compile")
            self._found[key] = self._thread.submit(self._compile, key, lower)

    def get(self, key: Hashable, lower: Callable[[], jax.stages.Lowered]) -> Any:
        """The compiled program. Compiles it now if that has not begun, or has failed."""
        found = self._found.get(key)
        if found is None or found.cancel() or found.exception() is not None:
            compiled = self._compile(key, lower)
            self._found[key] = found = Future()
            found.set_result(compiled)
        return found.result()

    def close(self) -> None:
        """Drops what is still waiting to be compiled."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)

    def _compile(self, key: Hashable, lower: Callable[[], jax.stages.Lowered]) -> Any:
        start = time.perf_counter()
        try:
            with jax.set_mesh(self._mesh):
                compiled = lower().compile()
        except Exception:
            logger.warning("cannot compile %s", key, exc_info=True)
            raise
        logger.debug("compiled %s in %.1f s", key, time.perf_counter() - start)
        return compiled
