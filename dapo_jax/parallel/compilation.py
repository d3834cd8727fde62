"""Host: XLA's options, and the compilation cache."""

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import jax

# XLA's options by platform, for passes over the layers: weights are gathered and gradients scattered while a layer
# computes. Sources: JAX, "GPU performance tips" (the first), NVIDIA JAX-Toolbox, "Tips for High-Performance LLMs with
# JAX and XLA" (both). XLA:TPU overlaps by default.
OVERLAP: Mapping[str, Mapping[str, bool]] = {
    "gpu": {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_enable_while_loop_double_buffering": True,  # two layers per iteration, so that they overlap too
    }
}

_LOWERED, _COMPILED = (  # events of JAX
    f"/jax/core/compile/{name}_duration" for name in ("jaxpr_to_mlir_module", "backend_compile")
)
CACHE = "JAX_COMPILATION_CACHE_DIR"  # JAX's; it takes precedence


@contextmanager
def compilation_shown(show: Callable[[str], None]) -> Iterator[None]:
    """Calls `show` with what is being compiled, and with "" when that is done."""
    under_way: set[int] = set()  # threads
    compiled = 0

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        nonlocal compiled
        del duration_secs, kwargs
        if event == _LOWERED:  # XLA begins
            under_way.add(threading.get_ident())
        elif event == _COMPILED:
            under_way.discard(threading.get_ident())
            compiled += 1
        else:
            return
        show(f"compiling program {compiled + 1}" if under_way else "")

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def keep_compiled(directory: str) -> None:
    """Caches programs that took a second or more to compile in `directory`, or where CACHE says; "": nowhere."""
    if directory and CACHE not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(Path(directory).expanduser()))
