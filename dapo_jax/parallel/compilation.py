"""Host: compiler options, progress while compiling, and the compilation cache."""

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import jax

from dapo_jax.places import expanded

# XLA's options by platform for passes over the layers: they overlap gathering weights and scattering gradients with
# the computation of a layer. Sources: JAX, "GPU performance tips" (the first), NVIDIA JAX-Toolbox, "Tips for
# High-Performance LLMs with JAX and XLA" (both). XLA:TPU overlaps by default.
OVERLAP: Mapping[str, Mapping[str, bool]] = {
    "gpu": {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_enable_while_loop_double_buffering": True,  # two layers per iteration, so that they overlap too
    }
}

_LOWERED, _COMPILED = (  # events of JAX
    f"/jax/core/compile/{name}_duration" for name in ("jaxpr_to_mlir_module", "backend_compile")
)
CACHE = "JAX_COMPILATION_CACHE_DIR"  # JAX's variable; if set, it takes precedence over the config


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


def keep_compiled(directory: str) -> None:
    """Caches programs that take a second or more to compile in `directory`; CACHE takes precedence, "" = no cache."""
    if directory and CACHE not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(expanded(directory)))
